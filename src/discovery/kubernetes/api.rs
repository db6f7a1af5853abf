//! Requests to the API server, over the client of `kube`: its configuration, TLS and credentials (tokens that rotate in
//! a file are read again every minute by it).
//!
//! The client hands out bodies as they come. They are read here, with bounds on time and size that it does not have.

use std::path::Path;
use std::time::Duration;

use http_body_util::BodyExt as _;
use kube::client::{AuthError, Body};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::params::{ListParams, WatchParams};
use kube::{Client, Config};
use tokio::time::timeout;

use super::Watched;
use super::wire::{Objects, Page, Refusal, one_line, read_page};

/// Bytes of one page that are read. A page of the largest objects that etcd takes would be longer, and is refused.
const MAX_PAGE_BYTES: usize = 256 << 20;
/// Bytes of one line of a watch. An object of Kubernetes has 1.5 MiB at most, JSON being longer.
const MAX_LINE_BYTES: usize = 16 << 20;
/// Bytes of a refusal that are read.
const MAX_REFUSAL_BYTES: usize = 64 << 10;
/// Who asks, in the audit log of the API server.
const USER_AGENT: &str = concat!("tandem/", env!("CARGO_PKG_VERSION"));
/// Causes shown of an error that wraps others.
const MAX_CAUSES: usize = 8;

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The file named on the command line.
    #[error("the kubeconfig cannot be used: {0}")]
    Kubeconfig(String),
    /// Neither `KUBECONFIG`, nor `~/.kube/config`, nor a service account.
    #[error(
        "say where the pods are: --pods FILE-or-DIR, --standalone --endpoints-config FILE, or --kubeconfig FILE; \
         none was given, and there is no Kubernetes configuration around this process: {0}"
    )]
    NoCluster(String),
    /// The selector of `TANDEM_KUBERNETES_POD_SELECTOR`.
    #[error("TANDEM_KUBERNETES_POD_SELECTOR is no label selector: {0}")]
    Selector(crate::fleet::SelectorError),
}

/// What went wrong with a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// The API server answered, with another status than 200.
    #[error("the API server says {0}")]
    Refused(Refusal),
    /// There was no whole answer: connection, TLS, credentials.
    #[error("{0}")]
    Unreachable(String),
    /// No answer in time, or no more of it.
    #[error("no answer within {} s", .0.as_secs_f64())]
    Late(Duration),
    /// A page that was still arriving when its time was up.
    #[error("the answer was not complete after {} s", .0.as_secs_f64())]
    Slow(Duration),
    /// An answer that began well and then stopped: the API server ends requests that take too long.
    #[error("the answer broke off: {0}")]
    Broken(String),
    /// An answer longer than this many bytes.
    #[error("the answer is longer than {0} bytes")]
    TooLong(usize),
    /// An answer that is not what was asked for.
    #[error("the answer cannot be read (line {line}, column {column})")]
    Unreadable {
        /// Where in the answer.
        line: usize,
        /// Where in the line.
        column: usize,
    },
}

impl ApiError {
    /// The status that the API server answered with.
    pub fn code(&self) -> Option<u16> {
        match self {
            ApiError::Refused(refusal) => Some(refusal.code),
            _ => None,
        }
    }

    /// The label of metrics.
    pub fn label(&self) -> &'static str {
        match self {
            ApiError::Refused(refusal) => match refusal.code {
                401 => "unauthorized",
                403 => "forbidden",
                404 => "absent",
                410 => "gone",
                429 => "throttled",
                _ => "refused",
            },
            ApiError::Unreachable(_) | ApiError::Broken(_) => "unreachable",
            ApiError::Late(_) | ApiError::Slow(_) => "late",
            ApiError::TooLong(_) | ApiError::Unreadable { .. } => "unreadable",
        }
    }

    /// Nothing that was asked for can be had at present, whatever it is: no connection, no answer, no valid credentials.
    /// What concerns one kind of object (403, 404, 410, an answer that cannot be read) is not meant.
    pub(super) fn is_outage(&self) -> bool {
        match self {
            ApiError::Refused(refusal) => matches!(refusal.code, 401 | 408 | 429 | 500..),
            ApiError::Unreachable(_) | ApiError::Late(_) | ApiError::Slow(_) | ApiError::Broken(_) => true,
            ApiError::TooLong(_) | ApiError::Unreadable { .. } => false,
        }
    }

    /// How long the API server wants to be left alone.
    pub fn retry_after(&self) -> Duration {
        match self {
            ApiError::Refused(refusal) => Duration::from_secs(u64::from(refusal.retry_after_s)),
            _ => Duration::ZERO,
        }
    }
}

impl From<kube::Error> for ApiError {
    fn from(error: kube::Error) -> ApiError {
        ApiError::Unreachable(causes(&error))
    }
}

/// An error and its causes on one line, without what a credential command printed.
fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut texts: Vec<String> = Vec::new();
    let mut next = Some(error);
    while let Some(error) = next.filter(|_| texts.len() < MAX_CAUSES) {
        if let Some(AuthError::AuthExecRun { out, .. }) = error.downcast_ref::<AuthError>() {
            return format!("the command that fetches credentials failed ({})", out.status);
        }
        if let Some(AuthError::AuthExecParse(_)) = error.downcast_ref::<AuthError>() {
            return "what the command that fetches credentials printed cannot be read".to_owned();
        }
        next = error.source();
        let text = error.to_string();
        // Most wrappers repeat what they wrap.
        if let Some(last) = texts.last_mut()
            && last.contains(&text)
        {
            continue;
        }
        texts.push(text);
    }
    one_line(&texts.join(": "))
}

/// Connects to the cluster of `kubeconfig`, or to the one that this process finds itself in. Sends nothing yet.
///
/// # Errors
/// See [`ConnectError`].
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ConnectError> {
    let mut config = match kubeconfig {
        Some(path) => {
            let unusable = |error: &(dyn std::error::Error + 'static)| ConnectError::Kubeconfig(causes(error));
            let file = Kubeconfig::read_from(path).map_err(|error| unusable(&error))?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(file, &options).await.map_err(|error| unusable(&error))?
        }
        None => Config::infer().await.map_err(|error| ConnectError::NoCluster(causes(&error)))?,
    };
    // Repeating is the watcher's business: it knows what the API server said, and tells it.
    config.default_retry = false;
    config.headers.push((http::header::USER_AGENT, http::HeaderValue::from_static(USER_AGENT)));
    tracing::info!(api_server = %config.cluster_url, "discovering pods through Kubernetes");
    Client::try_from(config).map_err(|error| ConnectError::Kubeconfig(causes(&error)))
}

/// How long one answer may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Until its head is there, and from one piece of its body to the next.
    pub(super) silence: Duration,
    /// All of it.
    pub(super) whole: Duration,
}

/// One resource in one namespace, or in all.
#[derive(Clone)]
pub(super) struct Resource {
    pub(super) client: Client,
    pub(super) path: String,
    pub(super) selector: Option<String>,
}

impl Resource {
    /// The resource of that kind.
    pub(super) fn new<T: Watched>(client: Client, namespace: Option<&str>, selector: Option<String>) -> Resource {
        let root = if T::GROUP.is_empty() {
            format!("/api/{}", T::VERSION)
        } else {
            format!("/apis/{}/{}", T::GROUP, T::VERSION)
        };
        let path = match namespace {
            Some(namespace) => format!("{root}/namespaces/{namespace}/{}", T::PLURAL),
            None => format!("{root}/{}", T::PLURAL),
        };
        Resource { client, path, selector }
    }

    /// Fetches one page of the list, of `limit` objects from `token` on, into `objects`.
    pub(super) async fn page<T: Watched>(
        &self,
        token: Option<&str>,
        limit: u32,
        patience: Patience,
        objects: &mut Objects<T>,
    ) -> Result<Page, ApiError> {
        let params = ListParams {
            label_selector: self.selector.clone(),
            limit: Some(limit),
            continue_token: token.map(str::to_owned),
            ..ListParams::default()
        };
        let request = kube::core::Request::new(&self.path).list(&params).map_err(|error| cannot_ask(&error))?;
        let body = self.ask(request, patience.silence).await?;
        let bytes = timeout(patience.whole, whole(body, MAX_PAGE_BYTES, patience.silence))
            .await
            .map_err(|_| ApiError::Slow(patience.whole))??;
        read_page(&bytes, objects).map_err(|error| ApiError::Unreadable { line: error.line(), column: error.column() })
    }

    /// Opens a watch for what comes after `version`. The API server ends it after `seconds`.
    pub(super) async fn watch(&self, version: &str, seconds: u32, answer: Duration) -> Result<Lines, ApiError> {
        let params = WatchParams {
            label_selector: self.selector.clone(),
            timeout: Some(seconds),
            bookmarks: true,
            ..WatchParams::default()
        };
        let request =
            kube::core::Request::new(&self.path).watch(&params, version).map_err(|error| cannot_ask(&error))?;
        Ok(Lines { body: self.ask(request, answer).await?, rest: Vec::new(), searched: 0 })
    }

    /// The body of an answer whose head was there in time and said that all is well.
    async fn ask(&self, request: http::Request<Vec<u8>>, within: Duration) -> Result<Body, ApiError> {
        timeout(within, self.answered(request)).await.map_err(|_| ApiError::Late(within))?
    }

    async fn answered(&self, request: http::Request<Vec<u8>>) -> Result<Body, ApiError> {
        let answer = self.client.send(request.map(Body::from)).await?;
        if answer.status().is_success() {
            return Ok(answer.into_body());
        }
        let (head, body) = answer.into_parts();
        let bytes = whole(body, MAX_REFUSAL_BYTES, Duration::MAX).await.unwrap_or_default();
        let mut refusal = Refusal::read(head.status.as_u16(), &bytes);
        let after = head.headers.get(http::header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        refusal.retry_after_s = after.unwrap_or(refusal.retry_after_s);
        if refusal.reason.is_empty() {
            head.status.canonical_reason().unwrap_or_default().clone_into(&mut refusal.reason);
        }
        Err(ApiError::Refused(refusal))
    }
}

fn cannot_ask(error: &kube::core::request::Error) -> ApiError {
    ApiError::Unreachable(causes(error))
}

/// All of a body. As long as more of it arrives within `silence` each time, it is waited for.
async fn whole(mut body: Body, limit: usize, silence: Duration) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(frame) = timeout(silence, body.frame()).await.map_err(|_| ApiError::Late(silence))? {
        let Ok(data) = frame.map_err(|error| ApiError::Broken(causes(&error)))?.into_data() else { continue };
        if bytes.len() + data.len() > limit {
            return Err(ApiError::TooLong(limit));
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

/// The lines of a watch.
pub(super) struct Lines {
    body: Body,
    rest: Vec<u8>,
    /// Bytes of `rest` that are known to hold no end of a line.
    searched: usize,
}

impl Lines {
    /// The next line; `None` when the watch has ended. What was cut off in the middle of a line is dropped: a watch
    /// resumes before it. Nothing is lost when the call is given up half-way, or when nothing arrived for `silence`
    /// ([`ApiError::Late`]).
    pub(super) async fn next(&mut self, silence: Duration) -> Result<Option<Vec<u8>>, ApiError> {
        loop {
            let unsearched = self.rest.get(self.searched..).unwrap_or_default();
            if let Some(at) = memchr::memchr(b'\n', unsearched) {
                let after = self.rest.split_off(self.searched + at + 1);
                self.searched = 0;
                return Ok(Some(std::mem::replace(&mut self.rest, after)));
            }
            self.searched = self.rest.len();
            if self.rest.len() > MAX_LINE_BYTES {
                return Err(ApiError::TooLong(MAX_LINE_BYTES));
            }
            let frame = timeout(silence, self.body.frame()).await.map_err(|_| ApiError::Late(silence))?;
            let Some(frame) = frame else { return Ok(None) };
            if let Ok(data) = frame?.into_data() {
                self.rest.extend_from_slice(&data);
            }
        }
    }
}
