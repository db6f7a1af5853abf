//! What operators see: counters by exact name and label, the engines' signals, readiness and the list of models.

mod admin;
mod counters;
mod signals;

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::harness::engines::MODEL;
use crate::harness::fleet::FleetOptions;
use crate::harness::metrics::Metrics;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually};

const CHAT: &str = "/v1/chat/completions";

/// One replica with its front, and no Envoy.
fn front(env: &[(&str, &str)]) -> FleetOptions {
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    FleetOptions { replicas: 1, envoy: false, front: true, env, args: Vec::new(), ..FleetOptions::default() }
}

/// A chat request for `tokens` tokens; a stream reports usage.
fn chat(stream: bool, tokens: u32) -> String {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": "tell me"}], "max_tokens": tokens});
    if stream {
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
    }
    body.to_string()
}

/// All series of a metric: its labels but `gateway_pod`, as `name=value` in order, and its value.
fn all(metrics: &Metrics, name: &str) -> BTreeMap<String, f64> {
    let labels = |labels: &BTreeMap<String, String>| {
        let texts: Vec<String> = labels
            .iter()
            .filter(|(key, _)| *key != "gateway_pod")
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        texts.join(",")
    };
    metrics.matching(name, &[]).map(|sample| (labels(&sample.labels), sample.value)).collect()
}

/// Waits until `/debug/fleet` satisfies `condition`.
async fn fleet_shows(tandem: &Tandem, what: &str, condition: impl Fn(&Value) -> bool) -> Value {
    eventually(SOON, what, async || Some(tandem.admin_json("/debug/fleet").await).filter(|page| condition(page))).await
}

/// A pod of the sandbox's model on that page.
fn pod<'a>(page: &'a Value, name: &str) -> &'a Value {
    let pods = page["models"][MODEL]["pods"].as_array().map_or(&[][..], Vec::as_slice);
    pods.iter().find(|pod| pod["name"] == format!("default/{name}")).unwrap_or(&Value::Null)
}
