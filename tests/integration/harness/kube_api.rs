//! A stand-in for the API server of Kubernetes: lists in pages, watches with bookmarks, and what goes wrong with them.
//!
//! It speaks HTTP to the real client. What it knows is put into it by the test; how it behaves, too. As in the real one,
//! every change has a version of its own, a watch resumes from a version as long as that was not compacted away, and an
//! object that leaves a selector is told as deleted.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

use super::Task;
use super::drip::{self, Drip};
use super::kube_wire::{KINDS, gone, gone_line, place, status};

/// What the client says to be let in.
pub const TOKEN: &str = "a-token-of-the-test";

type Key = (String, String, String);

/// What was asked, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// `list` or `watch`.
    pub verb: &'static str,
    /// `pods`, ….
    pub plural: String,
    /// `None` = all namespaces.
    pub namespace: Option<String>,
    /// The parameters.
    pub query: BTreeMap<String, String>,
    /// `user-agent`.
    pub agent: String,
}

/// How watches of a kind behave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mood {
    /// As they should.
    #[default]
    Well,
    /// Open, and silent: no event, no bookmark, no end.
    Stalled,
    /// Answered with 200, and closed without a word.
    Closing,
    /// Refused with this status.
    Failing(u16),
    /// The version is too old, whatever it is: told by the HTTP status.
    Gone,
    /// The same, told by an event.
    GoneByEvent,
}

#[derive(Debug)]
struct Change {
    version: u64,
    plural: String,
    before: Option<Value>,
    after: Option<Value>,
}

#[derive(Debug, Default)]
struct Inner {
    version: u64,
    compacted: u64,
    objects: BTreeMap<Key, Value>,
    changes: Vec<Change>,
    unknown: Vec<String>,
    refused: Vec<(&'static str, String, Option<String>, u16)>,
    moods: HashMap<String, Mood>,
    /// Grows whenever the open watches of a kind are to end; true = with 410.
    ends: HashMap<String, (u64, bool)>,
    pages: HashMap<String, (Vec<Value>, u64)>,
    page: Option<usize>,
    broken_pages: usize,
    bookmarks: Option<Duration>,
    drip: Option<Drip>,
    asked: Vec<Asked>,
    open: usize,
    locked_out: bool,
}

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    changed: watch::Sender<u64>,
}

/// The stand-in. It ends with this value.
#[derive(Debug)]
pub struct KubeApi {
    address: SocketAddr,
    shared: Arc<Shared>,
    directory: TempDir,
    _task: Task,
}

impl KubeApi {
    /// Starts one that knows all kinds and holds nothing.
    pub async fn start() -> KubeApi {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let inner = Inner { version: 1000, bookmarks: Some(Duration::from_millis(500)), ..Inner::default() };
        let shared = Arc::new(Shared { inner: Mutex::new(inner), changed: watch::Sender::new(0) });
        let router = Router::new().fallback(answer).with_state(Arc::clone(&shared));
        let task = Task::spawn(async move { axum::serve(listener, router).await.expect("serves") });
        let directory = tempfile::Builder::new().prefix("kube-").tempdir().expect("temporary directory");
        let api = KubeApi { address, shared, directory, _task: task };
        api.kubeconfig_for("config", &format!("http://{address}"), TOKEN);
        api
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The kubeconfig that leads to it.
    pub fn kubeconfig(&self) -> PathBuf {
        self.directory.path().join("config")
    }

    /// Another kubeconfig, kept beside it.
    pub fn kubeconfig_for(&self, name: &str, server: &str, token: &str) -> PathBuf {
        let path = self.directory.path().join(name);
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": {"server": server}}],
            "users": [{"name": "test", "user": {"token": token}}],
        });
        std::fs::write(&path, config.to_string()).expect("write a kubeconfig");
        path
    }

    /// Creates or replaces an object. Its version is set; a `namespace` it must have.
    pub fn put(&self, plural: &str, object: &Value) {
        let text = |field: &str| object["metadata"][field].as_str().expect("namespace and name").to_owned();
        let key = (plural.to_owned(), text("namespace"), text("name"));
        self.change(key, Some(object.clone()));
    }

    /// Changes an object.
    pub fn patch(&self, plural: &str, namespace: &str, name: &str, change: impl FnOnce(&mut Value)) {
        let mut object = self.get(plural, namespace, name).unwrap_or_else(|| panic!("no {plural} {namespace}/{name}"));
        change(&mut object);
        self.put(plural, &object);
    }

    /// An object as it is.
    pub fn get(&self, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        self.lock().objects.get(&(plural.to_owned(), namespace.to_owned(), name.to_owned())).cloned()
    }

    /// All objects of a kind.
    pub fn all(&self, plural: &str) -> Vec<Value> {
        self.lock().objects.iter().filter(|(key, _)| key.0 == plural).map(|(_, object)| object.clone()).collect()
    }

    /// Deletes an object.
    pub fn delete(&self, plural: &str, namespace: &str, name: &str) {
        self.change((plural.to_owned(), namespace.to_owned(), name.to_owned()), None);
    }

    /// Forgets all versions before the present one: a watch from one of them gets 410.
    pub fn compact(&self) {
        self.tell(|inner| {
            inner.compacted = inner.version;
            inner.changes.clear();
        });
    }

    /// Ends the open watches of a kind: with nothing, or with an event that says 410.
    pub fn end_watches(&self, plural: &str, gone: bool) {
        self.tell(|inner| {
            let end = inner.ends.entry(plural.to_owned()).or_default();
            *end = (end.0 + 1, gone);
        });
    }

    /// How watches of a kind behave from now on. Open ones only stall and go on; the other moods are for new ones.
    pub fn mood(&self, plural: &str, mood: Mood) {
        self.tell(|inner| {
            inner.moods.insert(plural.to_owned(), mood);
        });
    }

    /// How they behave now.
    pub fn mood_of(&self, plural: &str) -> Mood {
        self.lock().moods.get(plural).copied().unwrap_or_default()
    }

    /// Refuses a verb on a kind with this status, in one namespace or (`None`) wherever it is asked for.
    pub fn refuse(&self, verb: &'static str, plural: &str, namespace: Option<&str>, status: u16) {
        self.tell(|inner| inner.refused.push((verb, plural.to_owned(), namespace.map(str::to_owned), status)));
    }

    /// Takes all refusals back.
    pub fn allow_everything(&self) {
        self.tell(|inner| inner.refused.clear());
    }

    /// The kind is not installed: 404. Or it is again.
    pub fn installed(&self, plural: &str, installed: bool) {
        self.tell(|inner| {
            inner.unknown.retain(|known| known != plural);
            if !installed {
                inner.unknown.push(plural.to_owned());
            }
        });
    }

    /// No token is good any more, or all are again.
    pub fn lock_out(&self, locked_out: bool) {
        self.tell(|inner| inner.locked_out = locked_out);
    }

    /// Pages of lists hold so many objects at most; and the next so many pages beyond a first one get 410.
    pub fn pages(&self, of: usize, broken: usize) {
        self.tell(|inner| (inner.page, inner.broken_pages) = (Some(of), broken));
    }

    /// The time between bookmarks; `None` = there are none.
    pub fn bookmarks(&self, every: Option<Duration>) {
        self.tell(|inner| inner.bookmarks = every);
    }

    /// How slowly lists are sent; `None` = at once.
    pub fn drip(&self, drip: Option<Drip>) {
        self.tell(|inner| inner.drip = drip);
    }

    /// What was asked so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.lock().asked.clone()
    }

    /// How often a verb was asked of a kind.
    pub fn count(&self, verb: &str, plural: &str) -> usize {
        self.lock().asked.iter().filter(|asked| asked.verb == verb && asked.plural == plural).count()
    }

    /// Watches that are open.
    pub fn open(&self) -> usize {
        self.lock().open
    }

    fn change(&self, key: Key, after: Option<Value>) {
        self.tell(|inner| {
            inner.version += 1;
            let version = inner.version;
            let stamp = |mut object: Value| {
                object["metadata"]["resourceVersion"] = version.to_string().into();
                object
            };
            let after = after.map(stamp);
            let before = match &after {
                Some(object) => inner.objects.insert(key.clone(), object.clone()),
                None => Some(stamp(inner.objects.remove(&key).unwrap_or_else(|| panic!("no {key:?}")))),
            };
            inner.changes.push(Change { version, plural: key.0, before, after });
        });
    }

    fn tell(&self, change: impl FnOnce(&mut Inner)) {
        change(&mut self.lock());
        self.shared.changed.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.shared.inner.lock().expect("the stand-in")
    }
}

async fn answer(
    State(shared): State<Arc<Shared>>,
    uri: Uri,
    Query(query): Query<BTreeMap<String, String>>,
    headers: HeaderMap,
) -> Response {
    let Some((plural, namespace)) = place(uri.path()) else {
        return status(404, "NotFound", "the server could not find the requested resource");
    };
    let watching = query.get("watch").is_some_and(|value| value == "true");
    let verb = if watching { "watch" } else { "list" };
    let mut inner = shared.inner.lock().expect("the stand-in");
    let agent = headers.get("user-agent").and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let asked = Asked { verb, plural: plural.to_owned(), namespace: namespace.clone(), query: query.clone(), agent };
    inner.asked.push(asked);
    let token = headers.get("authorization").and_then(|value| value.to_str().ok());
    if inner.locked_out || token != Some(&format!("Bearer {TOKEN}")) {
        return status(401, "Unauthorized", "Unauthorized");
    }
    let refusal = inner
        .refused
        .iter()
        .find(|(its, of, place, _)| *its == verb && of == plural && (place.is_none() || *place == namespace));
    if let Some((_, _, _, code)) = refusal {
        let place =
            namespace.map_or_else(|| "at the cluster scope".to_owned(), |name| format!("in the namespace {name:?}"));
        let text = format!(
            "{plural} is forbidden: User \"system:serviceaccount:aibrix-system:tandem\" cannot {verb} resource {plural:?} \
             in API group \"\" {place}"
        );
        let reason = if *code == 403 { "Forbidden" } else { "InternalError" };
        return status(*code, reason, &text);
    }
    if inner.unknown.iter().any(|unknown| unknown == plural) {
        return (StatusCode::NOT_FOUND, "404 page not found\n").into_response();
    }
    let selector = query.get("labelSelector").cloned().unwrap_or_default();
    let seen = Seen { plural: plural.to_owned(), namespace, selector };
    if !watching {
        return list(&mut inner, &seen, &query);
    }
    let from: u64 = query["resourceVersion"].parse().expect("a version");
    let mood = inner.moods.get(plural).copied().unwrap_or_default();
    match mood {
        Mood::Failing(code) => return status(code, "InternalError", "etcdserver: leader changed"),
        Mood::Closing => return Body::empty().into_response(),
        Mood::Gone => return gone(),
        Mood::GoneByEvent => return Body::from(gone_line()).into_response(),
        Mood::Well | Mood::Stalled if from < inner.compacted => return gone(),
        Mood::Well | Mood::Stalled => {}
    }
    inner.open += 1;
    drop(inner);
    let seconds: u64 = query["timeoutSeconds"].parse().expect("seconds");
    let bookmarks = query.get("allowWatchBookmarks").is_some_and(|value| value == "true");
    let (lines, body) = mpsc::channel(64);
    tokio::spawn(async move {
        let end = tokio::time::Instant::now() + Duration::from_secs(seconds);
        follow(&shared, &seen, from, end, bookmarks, &lines).await;
        shared.inner.lock().expect("the stand-in").open -= 1;
    });
    Body::from_stream(ReceiverStream::new(body)).into_response()
}

/// What a request is about.
struct Seen {
    plural: String,
    namespace: Option<String>,
    selector: String,
}

impl Seen {
    fn holds(&self, object: &Value) -> bool {
        let there = |namespace: &String| object["metadata"]["namespace"] == **namespace;
        self.namespace.as_ref().is_none_or(there)
            && self.selector.split(',').filter(|part| !part.is_empty()).all(|part| {
                let labels = &object["metadata"]["labels"];
                match part.split_once('=') {
                    Some((name, value)) => labels[name] == value,
                    None => labels[part].is_string(),
                }
            })
    }
}

fn list(inner: &mut Inner, seen: &Seen, query: &BTreeMap<String, String>) -> Response {
    let (mut items, version) = match query.get("continue") {
        Some(_) if inner.broken_pages > 0 => {
            inner.broken_pages -= 1;
            return status(410, "Expired", "The provided continue parameter is too old");
        }
        // A page that did not arrive is asked for again.
        Some(token) => inner.pages.get(token).expect("a token of an earlier page").clone(),
        None => {
            let all = inner.objects.iter().filter(|(key, _)| key.0 == seen.plural);
            (all.map(|(_, object)| object.clone()).filter(|object| seen.holds(object)).collect(), inner.version)
        }
    };
    let limit: usize = query["limit"].parse().expect("a limit");
    let rest = items.split_off(items.len().min(inner.page.unwrap_or(limit).min(limit)));
    let mut metadata = json!({"resourceVersion": version.to_string()});
    if !rest.is_empty() {
        let token = format!("token-{}", inner.asked.len());
        metadata["continue"] = token.clone().into();
        inner.pages.insert(token, (rest, version));
    }
    let kind = KINDS.iter().find(|(plural, _, _)| *plural == seen.plural).expect("a kind").2;
    let list = json!({"apiVersion": "v1", "kind": format!("{kind}List"), "metadata": metadata, "items": items});
    let text = list.to_string();
    let body = inner.drip.map_or_else(|| Body::from(text.clone()), |drip| drip::body(&text, drip));
    ([("content-type", "application/json")], body).into_response()
}

/// One watch, from a version on.
async fn follow(
    shared: &Shared,
    seen: &Seen,
    mut from: u64,
    end: tokio::time::Instant,
    bookmarks: bool,
    lines: &mpsc::Sender<Result<String, std::io::Error>>,
) {
    let mut changed = shared.changed.subscribe();
    let plural = &seen.plural;
    let began = shared.inner.lock().expect("the stand-in").ends.get(plural).map_or(0, |end| end.0);
    let mut bookmark = tokio::time::Instant::now();
    loop {
        let (mut texts, mut over) = (Vec::new(), false);
        let (stalled, every) = {
            let inner = shared.inner.lock().expect("the stand-in");
            let every = inner.bookmarks.filter(|_| bookmarks);
            let stalled = inner.moods.get(plural) == Some(&Mood::Stalled);
            if !stalled {
                if from < inner.compacted {
                    (texts, over) = (vec![gone_line()], true);
                } else {
                    let later = inner.changes.iter().rev().take_while(|change| change.version > from);
                    let mut later: Vec<&Change> = later.filter(|change| change.plural == *plural).collect();
                    later.reverse();
                    texts.extend(later.iter().filter_map(|change| line_of(change, seen)));
                    from = inner.version;
                }
                if let Some((_, gone)) = inner.ends.get(plural).copied().filter(|end| end.0 > began) {
                    over = true;
                    texts.extend(gone.then(gone_line));
                }
                if every.is_some_and(|every| bookmark.elapsed() >= every) {
                    bookmark = tokio::time::Instant::now();
                    let object = json!({"kind": "Any", "metadata": {"resourceVersion": from.to_string()}});
                    texts.push(json!({"type": "BOOKMARK", "object": object}).to_string() + "\n");
                }
            }
            (stalled, every)
        };
        for text in texts {
            if lines.send(Ok(text)).await.is_err() {
                return;
            }
        }
        if over || (!stalled && tokio::time::Instant::now() >= end) {
            return;
        }
        let wake = every
            .filter(|_| !stalled)
            .map_or(Duration::from_mins(10), |every| every.saturating_sub(bookmark.elapsed()));
        let due = if stalled { tokio::time::Instant::now() + wake } else { end };
        tokio::select! {
            told = changed.changed() => if told.is_err() { return },
            () = tokio::time::sleep(wake) => {}
            () = tokio::time::sleep_until(due) => {}
            () = lines.closed() => return,
        }
    }
}

fn line_of(change: &Change, seen: &Seen) -> Option<String> {
    let held = change.before.as_ref().filter(|object| seen.holds(object));
    let holds = change.after.as_ref().filter(|object| seen.holds(object));
    let (kind, object) = match (held, holds) {
        (None, Some(after)) => ("ADDED", after.clone()),
        (Some(_), Some(after)) => ("MODIFIED", after.clone()),
        (Some(before), None) => {
            let mut object = before.clone();
            object["metadata"]["resourceVersion"] = change.version.to_string().into();
            ("DELETED", object)
        }
        (None, None) => return None,
    };
    Some(json!({"type": kind, "object": object}).to_string() + "\n")
}
