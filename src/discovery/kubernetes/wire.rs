//! What the API server says, from text to values. Pure.
//!
//! Errors never quote what was read: a pod's environment may hold secrets.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::Watched;

/// Characters kept of one message of the API server.
const MAX_MESSAGE_CHARS: usize = 300;

/// Namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    /// `metadata.namespace`.
    pub namespace: Arc<str>,
    /// `metadata.name`.
    pub name: Arc<str>,
}

/// One object and the UID that tells it from earlier ones of its name.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry<T> {
    /// `metadata.uid`.
    pub uid: Box<str>,
    /// The object.
    pub object: Arc<T>,
}

/// The objects of a list or of a scope.
pub type Objects<T> = BTreeMap<ObjectKey, Entry<T>>;

/// What the API server refused, or went wrong with, in its own words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    /// HTTP status.
    pub code: u16,
    /// `reason`: `Forbidden`, `Expired`, ….
    pub reason: String,
    /// `message`, one line of bounded length.
    pub message: String,
    /// `details.retryAfterSeconds`; 0 = not said.
    pub retry_after_s: u32,
}

impl Refusal {
    /// The body of an answer with this status. A body that is no `Status` (a proxy's page) is not quoted.
    pub(super) fn read(code: u16, body: &[u8]) -> Refusal {
        let wire: StatusWire = serde_json::from_slice(body).unwrap_or_default();
        Refusal { code, ..wire.refusal() }
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.code)?;
        if !self.reason.is_empty() {
            write!(f, " {}", self.reason)?;
        }
        if self.message.is_empty() || self.message == self.reason { Ok(()) } else { write!(f, ": {}", self.message) }
    }
}

/// One page of a list.
pub(super) struct Page {
    /// `metadata.resourceVersion`.
    pub(super) version: String,
    /// `metadata.continue`, unless this is the last page.
    pub(super) next: Option<String>,
    /// Objects that could not be read.
    pub(super) unreadable: usize,
}

/// One line of a watch.
#[derive(Debug, PartialEq)]
pub(super) enum Event<T> {
    /// The object is there and looks like this; `None`: it is none of the gateway's business (any more).
    There(ObjectKey, Box<str>, Option<T>),
    /// The object with this UID has gone.
    Gone(ObjectKey, Box<str>),
    /// Nothing changed; only the version moves on.
    Bookmark,
    /// The watch is over.
    Error(Refusal),
    /// Something that cannot be read, or is not known.
    Unreadable,
}

#[derive(Deserialize)]
struct ListWire<'a> {
    #[serde(default)]
    metadata: ListMeta,
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ListMeta {
    resource_version: String,
    r#continue: Option<String>,
}

#[derive(Deserialize)]
struct LineWire<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct Head {
    metadata: HeadMeta,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct HeadMeta {
    name: String,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StatusWire {
    code: u16,
    reason: Option<String>,
    message: Option<String>,
    details: Option<DetailsWire>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct DetailsWire {
    retry_after_seconds: u32,
}

impl StatusWire {
    fn refusal(self) -> Refusal {
        Refusal {
            code: self.code,
            reason: one_line(&self.reason.unwrap_or_default()),
            message: one_line(&self.message.unwrap_or_default()),
            retry_after_s: self.details.unwrap_or_default().retry_after_seconds,
        }
    }
}

/// One line of bounded length.
pub(super) fn one_line(text: &str) -> String {
    let mut line: String = text.chars().take(MAX_MESSAGE_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(MAX_MESSAGE_CHARS).is_some() {
        line.push_str("...");
    }
    line
}

impl HeadMeta {
    fn identity(self) -> (ObjectKey, Box<str>) {
        let namespace = Arc::from(self.namespace.unwrap_or_default());
        (ObjectKey { namespace, name: Arc::from(self.name) }, Box::from(self.uid.unwrap_or_default()))
    }
}

/// Adds the objects of a page to `objects`. An error means that it is no list at all.
pub(super) fn read_page<T: Watched>(json: &[u8], objects: &mut Objects<T>) -> Result<Page, serde_json::Error> {
    let list: ListWire<'_> = serde_json::from_slice(json)?;
    let mut unreadable = 0;
    for item in list.items.unwrap_or_default() {
        match (serde_json::from_str::<Head>(item.get()), T::read(item.get())) {
            (Ok(head), Ok(Some(object))) => {
                let (key, uid) = head.metadata.identity();
                objects.insert(key, Entry { uid, object: Arc::new(object) });
            }
            (Ok(_), Ok(None)) => {}
            (Err(_), _) | (_, Err(_)) => unreadable += 1,
        }
    }
    let next = list.metadata.r#continue.filter(|token| !token.is_empty());
    Ok(Page { version: list.metadata.resource_version, next, unreadable })
}

/// Reads a line of a watch: what happened, and the version to resume from after it.
pub(super) fn read_line<T: Watched>(line: &[u8]) -> (Event<T>, Option<String>) {
    let Ok(wire) = serde_json::from_slice::<LineWire<'_>>(line) else { return (Event::Unreadable, None) };
    if wire.r#type == "ERROR" {
        let status: StatusWire = serde_json::from_str(wire.object.get()).unwrap_or_default();
        return (Event::Error(status.refusal()), None);
    }
    let Ok(Head { mut metadata }) = serde_json::from_str::<Head>(wire.object.get()) else {
        return (Event::Unreadable, None);
    };
    let version = metadata.resource_version.take().filter(|version| !version.is_empty());
    let event = match wire.r#type.as_ref() {
        "BOOKMARK" => Event::Bookmark,
        "DELETED" => {
            let (key, uid) = metadata.identity();
            Event::Gone(key, uid)
        }
        "ADDED" | "MODIFIED" => match T::read(wire.object.get()) {
            Ok(object) => {
                let (key, uid) = metadata.identity();
                Event::There(key, uid, object)
            }
            Err(_) => Event::Unreadable,
        },
        _ => Event::Unreadable,
    };
    (event, version)
}
