//! An HTTP/1.1 client that can read an answer piece by piece and walk away at any moment, and one for raw bytes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use super::{Task, within, within_time};

/// Crowds of requests are held back at an engine until all of them are there.
const LONGEST_ANSWER: Duration = Duration::from_mins(5);

/// A request to be sent over a connection of its own.
#[derive(Clone, Debug)]
pub struct Call {
    method: Method,
    base: String,
    path: String,
    headers: HeaderMap,
    body: Bytes,
    tls: Option<Arc<ClientConfig>>,
}

/// The head of an answer, and its body still to be read. Dropping it closes the connection.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    body: Incoming,
    _connection: Task,
}

/// A body as far as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    pub bytes: Bytes,
    /// False when the connection broke before the body's end.
    pub complete: bool,
}

/// `http://` and the address.
pub fn base(address: SocketAddr) -> String {
    format!("http://{address}")
}

impl Call {
    /// A GET. `base` is `http://ip:port`.
    pub fn get(base: &str, path: &str) -> Call {
        Call {
            method: Method::GET,
            base: base.to_owned(),
            path: path.to_owned(),
            headers: HeaderMap::new(),
            body: Bytes::new(),
            tls: None,
        }
    }

    /// A browser's question before a page of another origin may send a POST with these headers.
    pub fn preflight(base: &str, path: &str, origin: &str, headers: &str) -> Call {
        let call = Call { method: Method::OPTIONS, ..Call::get(base, path) };
        call.header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", headers)
    }

    /// A POST of JSON text.
    pub fn post(base: &str, path: &str, body: impl Into<Bytes>) -> Call {
        let call = Call { method: Method::POST, body: body.into(), ..Call::get(base, path) };
        call.header("content-type", "application/json")
    }

    /// A POST of which the caller says all headers, the content type too.
    pub fn post_bare(base: &str, path: &str, body: impl Into<Bytes>) -> Call {
        Call { method: Method::POST, body: body.into(), ..Call::get(base, path) }
    }

    /// Another method.
    #[must_use]
    pub fn method(self, method: Method) -> Call {
        Call { method, ..self }
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Call {
        let name = HeaderName::from_bytes(name.as_bytes()).expect("header name");
        self.headers.append(name, HeaderValue::from_str(value).expect("header value"));
        self
    }

    /// Sends it over TLS. The server is `localhost`, wherever it is.
    #[must_use]
    pub fn over(mut self, tls: &Arc<ClientConfig>) -> Call {
        self.tls = Some(Arc::clone(tls));
        self
    }

    /// Sends it and waits for the answer's head.
    pub async fn send(self) -> Answer {
        let what = self.what();
        within(&what, self.exchange()).await.unwrap_or_else(|error| panic!("{what}: {error}"))
    }

    /// Sends it; an error means that the connection broke before the answer's head. Panics when neither
    /// comes for longer than an engine is ever held in a test.
    pub async fn try_send(self) -> anyhow::Result<Answer> {
        let what = self.what();
        within_time(LONGEST_ANSWER, &what, self.exchange()).await
    }

    fn what(&self) -> String {
        format!("answer to {} {}{}", self.method, self.base, self.path)
    }

    async fn exchange(self) -> anyhow::Result<Answer> {
        let authority = self.base.strip_prefix("http://").expect("http base").to_owned();
        let stream = TcpStream::connect(&authority).await?;
        stream.set_nodelay(true)?;
        let (mut sender, connection, ended) = match &self.tls {
            None => handshake(stream).await?,
            Some(config) => {
                let name = ServerName::try_from("localhost").expect("a name");
                handshake(TlsConnector::from(Arc::clone(config)).connect(name, stream).await?).await?
            }
        };
        let mut request = Request::builder().method(self.method).uri(self.path).body(Full::new(self.body))?;
        *request.headers_mut() = self.headers;
        request.headers_mut().insert(http::header::HOST, HeaderValue::from_str(&authority)?);
        // A request that is handed over in the instant in which its connection ends can be lost in hyper's queue, and with
        // it its answer. What has no answer when the connection is gone gets none.
        let response = tokio::select! {
            biased;
            response = sender.send_request(request) => response?,
            _ = ended => anyhow::bail!("the connection ended before the request was sent"),
        };
        let (head, body) = response.into_parts();
        Ok(Answer { status: head.status, headers: head.headers, body, _connection: connection })
    }
}

async fn handshake(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> hyper::Result<(SendRequest<Full<Bytes>>, Task, oneshot::Receiver<()>)> {
    let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let (end, ended) = oneshot::channel();
    let connection = Task::spawn(async move {
        // Its failures reach the caller through the answer.
        let _ = connection.await;
        let _ = end.send(());
    });
    Ok((sender, connection, ended))
}

impl Answer {
    /// The next piece of the body: `None` at its end, an error when it was cut.
    pub async fn chunk(&mut self) -> Option<hyper::Result<Bytes>> {
        loop {
            match within("next piece of the answer", self.body.frame()).await? {
                Ok(frame) => {
                    if let Ok(data) = frame.into_data() {
                        return Some(Ok(data));
                    }
                }
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// The rest of the body.
    pub async fn body(mut self) -> Body {
        let mut bytes = Vec::new();
        while let Some(chunk) = self.chunk().await {
            match chunk {
                Ok(data) => bytes.extend_from_slice(&data),
                Err(_) => return Body { bytes: bytes.into(), complete: false },
            }
        }
        Body { bytes: bytes.into(), complete: true }
    }

    /// The rest of the body, which must be complete, as JSON.
    pub async fn json(self) -> serde_json::Value {
        let body = self.body().await;
        assert!(body.complete, "the answer was cut");
        serde_json::from_slice(&body.bytes)
            .unwrap_or_else(|error| panic!("{error} in {:?}", String::from_utf8_lossy(&body.bytes)))
    }

    /// A header as text; empty when absent.
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("header text"))
    }

    /// Reads the body as server-sent events.
    pub fn events(self) -> Events {
        Events { answer: self, rest: Vec::new(), cut: false }
    }

    /// Walks away: the connection closes at once.
    pub fn abandon(self) {
        drop(self);
    }
}

/// Server-sent events of an answer.
#[derive(Debug)]
pub struct Events {
    answer: Answer,
    rest: Vec<u8>,
    cut: bool,
}

impl Events {
    /// The data of the next event, its lines joined; `None` when the body has ended or broke off.
    pub async fn next(&mut self) -> Option<String> {
        loop {
            if let Some((event, used)) = first_event(&self.rest) {
                self.rest.drain(..used);
                if let Some(event) = event {
                    return Some(event);
                }
                continue;
            }
            if let Ok(data) = self.answer.chunk().await? {
                self.rest.extend_from_slice(&data);
            } else {
                self.cut = true;
                return None;
            }
        }
    }

    /// All events up to the end, and whether that end was a proper one.
    pub async fn collect(mut self) -> (Vec<String>, bool) {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        (events, !self.cut)
    }

    /// Walks away in the middle.
    pub fn abandon(self) {
        drop(self);
    }
}

/// Splits the first event off: its data (none for a comment) and how many bytes it took, blank line included.
pub fn first_event(bytes: &[u8]) -> Option<(Option<String>, usize)> {
    let mut data: Option<String> = None;
    let mut at = 0;
    while let Some(length) = bytes[at..].iter().position(|byte| *byte == b'\n') {
        let line = String::from_utf8_lossy(&bytes[at..at + length]).trim_end_matches('\r').to_owned();
        at += length + 1;
        if line.is_empty() {
            return Some((data, at));
        }
        if let Some(text) = line.strip_prefix("data:") {
            let text = text.strip_prefix(' ').unwrap_or(text);
            match &mut data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(text);
                }
                None => data = Some(text.to_owned()),
            }
        }
    }
    None
}

/// A connection for bytes that no client library would send.
#[derive(Debug)]
pub struct RawConnection(TcpStream);

impl RawConnection {
    /// Connects to `http://ip:port`.
    pub async fn open(base: &str) -> RawConnection {
        let authority = base.strip_prefix("http://").expect("http base");
        let stream = within("connect", TcpStream::connect(authority)).await.expect("connect");
        RawConnection(stream)
    }

    /// Sends bytes.
    pub async fn send(&mut self, bytes: &[u8]) {
        within("send", self.0.write_all(bytes)).await.expect("send");
    }

    /// Reads until `enough` says so; returns less when the peer closes first.
    pub async fn read_until(&mut self, enough: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        within("read", async {
            let mut bytes = Vec::new();
            while !enough(&bytes) {
                match self.0.read_buf(&mut bytes).await {
                    Ok(0) | Err(_) => break,
                    Ok(_) => {}
                }
            }
            bytes
        })
        .await
    }

    /// Reads until the peer closes.
    pub async fn read_to_end(&mut self) -> Vec<u8> {
        self.read_until(|_| false).await
    }

    /// Closes with a reset instead of a FIN.
    pub fn reset(self) {
        self.0.set_zero_linger().expect("linger");
    }
}
