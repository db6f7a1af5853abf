//! Model claims: annotations `modelclaim.aibrix.ai/<name>` by which a pod says that it serves, or would serve, a further
//! model (reference sections 1.5 and 3.1). Pure.
//!
//! A claim on a port of its own is another engine process, and so another entry of the fleet: `pod:claim`, with an
//! incarnation of its own that ends when the port changes. A claim on the port of an engine that is there already is a
//! further name of that engine. Everything else about it (address, readiness, labels, role, profiles) is the pod's.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;

use crate::fleet::{ClaimState, PodKey, PodSpec};

/// The annotation, up to the name of the claim.
pub(super) const MODEL_CLAIM_PREFIX: &str = "modelclaim.aibrix.ai/";

/// Claims read of one pod.
const MAX_CLAIMS: usize = 64;
/// The longest name of a claimed model, bytes.
const MAX_MODEL_BYTES: usize = 512;

/// Stands between the name of a pod and that of its claim, and between a UID and a port. Neither can hold it.
const BETWEEN: char = ':';

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    name: String,
    model: Arc<str>,
    /// 0 = no engine listens.
    port: u16,
    /// `None`: it does not say.
    state: Option<ClaimState>,
}

#[derive(Deserialize)]
struct Wire {
    model: Option<String>,
    port: Option<u16>,
    state: Option<String>,
}

/// The claims among `annotations`, ordered by name, and a sentence for each that cannot be used.
pub(super) fn read(annotations: &BTreeMap<String, Option<String>>) -> (Vec<Claim>, Vec<String>) {
    let (mut claims, mut problems) = (Vec::new(), Vec::new());
    let ours = annotations.range(MODEL_CLAIM_PREFIX.to_owned()..).map_while(|(key, value)| {
        let name = key.strip_prefix(MODEL_CLAIM_PREFIX)?;
        Some((name, value.as_deref()))
    });
    for (index, (name, text)) in ours.filter_map(|(name, text)| Some((name, text?))).enumerate() {
        if index == MAX_CLAIMS {
            problems.push(format!("more than {MAX_CLAIMS} model claims; the others are not read"));
            break;
        }
        match read_one(name, text) {
            Ok(claim) => claims.push(claim),
            Err(why) => {
                let shown: String = name.chars().take(64).collect();
                problems.push(format!("annotation {MODEL_CLAIM_PREFIX}{shown} is not used: {why}"));
            }
        }
    }
    (claims, problems)
}

/// Never quotes the annotation.
fn read_one(name: &str, text: &str) -> Result<Claim, &'static str> {
    let wire: Wire = serde_json::from_str(text)
        .map_err(|_| "it is not a JSON object with a text \"model\", a port number \"port\" and a text \"state\"")?;
    let model = wire.model.as_deref().map(str::trim).unwrap_or_default();
    if model.is_empty() || model.len() > MAX_MODEL_BYTES {
        return Err("\"model\" is missing or too long");
    }
    let Some(port) = wire.port else { return Err("\"port\" is missing") };
    let state = match wire.state.as_deref().map(str::trim) {
        None | Some("") => None,
        Some("active") => Some(ClaimState::Active),
        Some("activating") => Some(ClaimState::Activating),
        Some("sleeping") => Some(ClaimState::Sleeping),
        Some("failed") => Some(ClaimState::Failed),
        Some(_) => return Err("\"state\" is none of active, activating, sleeping and failed"),
    };
    if port == 0 && state == Some(ClaimState::Active) {
        return Err("it is active without a port");
    }
    Ok(Claim { name: name.to_owned(), model: Arc::from(model), port, state })
}

/// The entries for the claims of a pod. `own` are its own engines; claims on the port of one become further names of it.
pub(super) fn expand(pod: &PodSpec, own: &mut [PodSpec], claims: Vec<Claim>) -> Vec<PodSpec> {
    let mut specs: Vec<PodSpec> = Vec::new();
    for claim in claims {
        let active = claim.port > 0 && matches!(claim.state, None | Some(ClaimState::Active));
        let engine = match own.iter_mut().find(|engine| engine.port == claim.port) {
            Some(engine) => Some(engine),
            None => specs.iter_mut().find(|spec| spec.port == claim.port && spec.claim == Some(ClaimState::Active)),
        };
        match engine {
            Some(engine) if active => {
                if engine.model != claim.model && !engine.also.contains(&claim.model) {
                    engine.also.push(claim.model);
                }
            }
            _ => specs.push(entry(pod, claim, active)),
        }
    }
    specs
}

fn entry(pod: &PodSpec, claim: Claim, active: bool) -> PodSpec {
    let name = format!("{}{BETWEEN}{}", pod.key.name, claim.name);
    // One that says neither that it is active nor why not is just not routable.
    let state = claim.state.unwrap_or(ClaimState::Active);
    PodSpec {
        key: PodKey { namespace: Arc::clone(&pod.key.namespace), name: Arc::from(name) },
        uid: Arc::from(format!("{}{BETWEEN}{}", pod.uid, claim.port)),
        model: claim.model,
        port: claim.port,
        metric_port: claim.port,
        ready: pod.ready && active,
        also: Vec::new(),
        claim: Some(state),
        ..pod.clone()
    }
}

/// The pod that an entry belongs to, and its UID.
pub(super) fn owner(spec: &PodSpec) -> (PodKey, Arc<str>) {
    if spec.claim.is_none() {
        return (spec.key.clone(), Arc::clone(&spec.uid));
    }
    let name = spec.key.name.split_once(BETWEEN).map_or(&*spec.key.name, |(pod, _)| pod);
    let uid = spec.uid.rsplit_once(BETWEEN).map_or(&*spec.uid, |(uid, _)| uid);
    (PodKey { namespace: Arc::clone(&spec.key.namespace), name: Arc::from(name) }, Arc::from(uid))
}
