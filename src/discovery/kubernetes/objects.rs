//! The objects that are watched, reduced to what routing needs as soon as they come off the wire.
//!
//! A pod carries its whole specification, its history of conditions and whatever tools have noted in its annotations:
//! none of it is kept. What is kept of one object is bounded, whatever the API server sends.

use serde::Deserialize;

use crate::discovery::manifest::Manifest;

/// Texts kept of one list in an object (pods of an adapter, parents of a route).
pub const MAX_LISTED: usize = 4096;
/// Bytes kept of one text in an object.
const MAX_TEXT_BYTES: usize = 253;
/// Conditions kept of one parent of a route.
const MAX_CONDITIONS: usize = 32;

/// A kind of object that is watched.
pub trait Watched: Sized + PartialEq + Send + Sync + 'static {
    /// API group; empty for the core group.
    const GROUP: &'static str;
    /// API version.
    const VERSION: &'static str;
    /// The resource as RBAC spells it.
    const PLURAL: &'static str;
    /// The gateway serves without it: the resource may be unknown to the API server, or forbidden.
    const OPTIONAL: bool;

    /// Reads one object. `None`: it is none of the gateway's business.
    fn read(json: &str) -> Result<Option<Self>, serde_json::Error>;
}

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodObject(pub Manifest);

impl Watched for PodObject {
    const GROUP: &'static str = "";
    const VERSION: &'static str = "v1";
    const PLURAL: &'static str = "pods";
    const OPTIONAL: bool = false;

    fn read(json: &str) -> Result<Option<PodObject>, serde_json::Error> {
        let manifest: Manifest = serde_json::from_str(json)?;
        Ok(manifest.concerns_routing().then(|| PodObject(manifest.reduced())))
    }
}

/// A LoRA adapter: `modeladapters.model.aibrix.ai`. Its name is a model name that the pods in `instances` serve.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "AdapterWire")]
pub struct AdapterObject {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `status.instances`: names of pods in the adapter's namespace; at most [`MAX_LISTED`].
    pub instances: Vec<String>,
}

impl Watched for AdapterObject {
    const GROUP: &'static str = "model.aibrix.ai";
    const VERSION: &'static str = "v1alpha1";
    const PLURAL: &'static str = "modeladapters";
    const OPTIONAL: bool = true;

    /// One that is being deleted takes no new requests, while its controller still unloads it: it reads as gone.
    fn read(json: &str) -> Result<Option<AdapterObject>, serde_json::Error> {
        let wire: AdapterWire = serde_json::from_str(json)?;
        Ok(wire.metadata.deletion_timestamp.is_none().then(|| AdapterObject::from(wire)))
    }
}

/// A Gateway API route: `httproutes.gateway.networking.k8s.io`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "RouteWire")]
pub struct RouteObject {
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// `status.parents`: what each gateway made of the route; at most [`MAX_LISTED`].
    pub parents: Vec<RouteParent>,
}

/// What one gateway made of a route.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RouteParent {
    /// `conditions`.
    pub conditions: Vec<RouteCondition>,
}

/// A condition of a route.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct RouteCondition {
    /// `type`: `Accepted`, `ResolvedRefs`, ….
    #[serde(rename = "type")]
    pub kind: String,
    /// `status`: `True`, `False` or `Unknown`.
    pub status: String,
}

impl Watched for RouteObject {
    const GROUP: &'static str = "gateway.networking.k8s.io";
    const VERSION: &'static str = "v1";
    const PLURAL: &'static str = "httproutes";
    const OPTIONAL: bool = true;

    fn read(json: &str) -> Result<Option<RouteObject>, serde_json::Error> {
        serde_json::from_str(json).map(Some)
    }
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct WireMetadata {
    name: String,
    namespace: Option<String>,
    deletion_timestamp: Option<serde::de::IgnoredAny>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AdapterWire {
    metadata: WireMetadata,
    status: Option<AdapterStatus>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct AdapterStatus {
    instances: Option<Vec<String>>,
}

impl From<AdapterWire> for AdapterObject {
    fn from(wire: AdapterWire) -> AdapterObject {
        let mut instances = wire.status.unwrap_or_default().instances.unwrap_or_default();
        instances.truncate(MAX_LISTED);
        instances.retain(|name| name.len() <= MAX_TEXT_BYTES);
        AdapterObject { namespace: wire.metadata.namespace.unwrap_or_default(), name: wire.metadata.name, instances }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RouteWire {
    metadata: WireMetadata,
    status: Option<RouteStatus>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RouteStatus {
    parents: Option<Vec<RouteParent>>,
}

impl From<RouteWire> for RouteObject {
    fn from(wire: RouteWire) -> RouteObject {
        let mut parents = wire.status.unwrap_or_default().parents.unwrap_or_default();
        parents.truncate(MAX_LISTED);
        for parent in &mut parents {
            parent.conditions.truncate(MAX_CONDITIONS);
            for condition in &mut parent.conditions {
                condition.kind = bounded(std::mem::take(&mut condition.kind));
                condition.status = bounded(std::mem::take(&mut condition.status));
            }
        }
        RouteObject { namespace: wire.metadata.namespace.unwrap_or_default(), name: wire.metadata.name, parents }
    }
}

/// The text itself, or as much of its beginning as is kept.
fn bounded(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        let end = (0..=MAX_TEXT_BYTES).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
        text.truncate(end);
        text.shrink_to_fit();
    }
    text
}
