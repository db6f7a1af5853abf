//! Specs for tests.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Engine, PodKey, PodSpec, Role};

/// A ready vLLM pod of model `m` at 10.0.0.1:8000 in namespace `default`, without role.
pub(crate) fn spec(name: &str) -> PodSpec {
    let key = PodKey { namespace: Arc::from("default"), name: Arc::from(name) };
    PodSpec {
        uid: Arc::from(format!("uid-{name}")),
        restarts: 0,
        model: Arc::from("m"),
        host: Arc::from("10.0.0.1"),
        port: 8000,
        metric_port: 8000,
        engine: Engine::Vllm,
        kv_connector: None,
        bootstrap_port: 8998,
        role: Role::Other,
        roleset: None,
        replica_index: None,
        serves_http: true,
        pd: true,
        draining: false,
        tls: false,
        rank: 0,
        ready: true,
        terminating: false,
        labels: Arc::new(BTreeMap::new()),
        config: None,
        also: Vec::new(),
        claim: None,
        key,
    }
}

/// The same with a role in a roleset.
pub(crate) fn member(name: &str, role: Role, roleset: &str) -> PodSpec {
    PodSpec { role, roleset: Some(Arc::from(roleset)), ..spec(name) }
}
