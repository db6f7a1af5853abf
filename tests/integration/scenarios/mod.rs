//! Whole scenarios: a replayed trace, bursts, kills, and a fleet that changes under load.
//!
//! Here: what they have in common. A scenario ends with [`settle`], which is the oracle and more.

mod adapters;
mod balance;
mod bands;
mod churn;
mod data_parallel;
mod kills;
mod mooncake;
mod own_routes;
mod passing;
mod profiles;
mod registered;
mod rolesets;
mod routes;
mod signals;
mod strategies;
mod tokens;

use std::time::Duration;

use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, Timing};

use crate::harness::engines::{Backend, start_engine};
use crate::harness::fleet::Fleet;
use crate::harness::http::Call;
use crate::harness::oracle::oracle;
use crate::harness::pods::PodManifest;
use crate::harness::tandem::Tandem;
use crate::harness::{SOON, eventually, within};

/// A prefill and a decode engine of one roleset, and the names of their pods: `p<n>` and `d<n>` of `rs<n>`.
struct Pair {
    number: usize,
    prefill: Engine,
    decode: Engine,
}

impl Pair {
    /// Starts both engines of `model`; `change` is applied to each configuration.
    async fn start(number: usize, model: &str, change: impl Fn(EngineConfig) -> EngineConfig) -> Pair {
        Pair {
            number,
            prefill: start_engine(change(EngineConfig::prefill(model))).await,
            decode: start_engine(change(EngineConfig::decode(model))).await,
        }
    }

    /// The manifests of its two pods, with `config` as the annotation.
    fn pods(&self, config: &Value) -> [PodManifest; 2] {
        let model = &self.prefill.config().model;
        [("p", "prefill", &self.prefill), ("d", "decode", &self.decode)].map(|(letter, role, engine)| {
            PodManifest::new(&format!("{letter}{}", self.number), model, Engine::address(engine))
                .role(&format!("rs{}", self.number), role)
                .config(config)
        })
    }

    fn engines(&self) -> [&Engine; 2] {
        [&self.prefill, &self.decode]
    }
}

/// A chat of one message.
fn chat(model: &str, text: &str, max_tokens: u32, stream: bool) -> String {
    let messages = json!([{"role": "user", "content": text}]);
    json!({"model": model, "messages": messages, "max_tokens": max_tokens, "stream": stream}).to_string()
}

/// Words of which each is one token.
fn words(count: usize) -> String {
    vec!["word"; count].join(" ")
}

/// A request with that body.
fn ask(path: &str, body: impl Into<bytes::Bytes>) -> Call {
    Call::post(path, "/v1/chat/completions", body)
}

/// Time for prompts of a few words and answers of a few tokens, so that each phase lasts a while.
fn slow(prefill: Duration, decode_step: Duration) -> Timing {
    Timing { prefill_base: prefill, decode_base: decode_step, ..Timing::instant() }
}

/// The pods of `/debug/fleet`, of all models.
fn pods_of(page: &Value) -> Vec<&Value> {
    let models = page["models"].as_object().into_iter().flat_map(serde_json::Map::values);
    models.flat_map(|model| model["pods"].as_array().into_iter().flatten()).collect()
}

/// The entry of a pod (`namespace/name`) in `/debug/fleet`.
fn pod_of<'a>(page: &'a Value, name: &str) -> Option<&'a Value> {
    pods_of(page).into_iter().find(|pod| pod["name"] == name)
}

/// Waits until the fleet, as each replica sees it, satisfies `condition`.
async fn fleet_shows(tandems: &[Tandem], what: &str, condition: impl Fn(&Value) -> bool) {
    for tandem in tandems {
        let probe = async || condition(&tandem.admin_json("/debug/fleet").await).then_some(());
        eventually(SOON, what, probe).await;
    }
}

/// Waits until each replica routes to exactly these pods (names in namespace `default`), whatever else it knows.
async fn routable(tandems: &[Tandem], names: &[&str]) {
    let mut wanted: Vec<String> = names.iter().map(|name| format!("default/{name}")).collect();
    wanted.sort();
    fleet_shows(tandems, &format!("{wanted:?} are routable"), |page| {
        let mut seen: Vec<&str> = pods_of(page)
            .into_iter()
            .filter(|pod| pod["routable"] == true)
            .filter_map(|pod| pod["name"].as_str())
            .collect();
        seen.sort_unstable();
        seen == wanted
    })
    .await;
}

/// The end of a scenario: the oracle holds, nobody panicked, and no engine saw its protocol broken.
async fn settle(tandems: &[Tandem], engines: &[&Engine]) {
    let backends: Vec<&dyn Backend> = engines.iter().map(|engine| *engine as &dyn Backend).collect();
    oracle(tandems, &backends).await;
    for tandem in tandems {
        assert_eq!(tandem.metrics().await.sum("tandem_panics_caught_total", &[]), 0.0, "panics");
    }
    for engine in engines {
        assert!(engine.violations().is_empty(), "{}: {:?}", Engine::address(engine), engine.violations());
    }
}

/// [`settle`] for the whole fleet and these pairs.
async fn settle_pairs(fleet: &Fleet, pairs: &[Pair]) {
    let engines: Vec<&Engine> = pairs.iter().flat_map(Pair::engines).collect();
    settle(&fleet.tandems, &engines).await;
}

/// Waits until an engine satisfies `condition`.
async fn engine_shows(what: &str, engine: &Engine, condition: impl Fn(&Engine) -> bool) {
    within(what, engine.wait_until(condition)).await;
}

/// Pseudo-random numbers that a failing run can be repeated with (splitmix64).
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}
