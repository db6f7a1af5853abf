//! Where the cells of one dialect are played: a pair of engines, pods that stand for them in three lanes, one replica with
//! Envoy before it.
//!
//! Cells share the engines: each marks its requests with a header, by which faults are scripted and records are told apart.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use tandem_sim::{Engine, EngineConfig, Record};
use tokio::net::TcpSocket;

use super::cells::Dialect;
use crate::harness::engines::{MODEL, start_engine};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::pods::PodManifest;

/// The prefill timeout; whole seconds are the finest.
pub const PREFILL_TIMEOUT: Duration = Duration::from_secs(2);
/// All three timers of the decode watchdog.
pub const WATCHDOG: Duration = Duration::from_secs(4);
/// Between the two aborts.
pub const ABORT_AGAIN: Duration = Duration::from_millis(300);

pub struct Stage {
    pub dialect: Dialect,
    pub prefill: Engine,
    pub decode: Engine,
    pub fleet: Fleet,
    /// A port at which nobody listens, and which nobody else can get.
    _nobody: TcpSocket,
}

impl Stage {
    /// `more` are settings beside those of every stage, or in their place.
    pub async fn set(dialect: Dialect, more: &[(&'static str, &str)]) -> Stage {
        let prefill = start_engine(dialect.configure(EngineConfig::prefill(MODEL))).await;
        let decode = start_engine(dialect.configure(EngineConfig::decode(MODEL))).await;
        let nobody = TcpSocket::new_v4().expect("a socket");
        nobody.bind(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
        let dead = nobody.local_addr().expect("an address");
        let (alive_prefill, alive_decode) = (Engine::address(&prefill), Engine::address(&decode));
        let lanes = [
            ("live", alive_prefill, alive_decode),
            ("no-prefill", dead, alive_decode),
            ("no-decode", alive_prefill, dead),
        ];
        let bootstrap = prefill.bootstrap_port();
        let pods = lanes.into_iter().flat_map(|(lane, prefill, decode)| {
            [("prefill", prefill), ("decode", decode)].map(|(role, address)| {
                let pod =
                    PodManifest::new(&format!("{role}-{lane}"), MODEL, address).role(lane, role).label("lane", lane);
                engine_of(dialect, pod.config(&profile()), bootstrap)
            })
        });
        let mut env = vec![
            ("AIBRIX_PREFILL_REQUEST_TIMEOUT", PREFILL_TIMEOUT.as_secs().to_string()),
            ("AIBRIX_DECODE_ABORT_RETRY_DELAY", ABORT_AGAIN.as_secs_f64().to_string()),
            // A pod that fails again and again is the point here.
            ("TANDEM_EJECTION_FAILURES", "0".to_owned()),
            // Blocks that a failure leaves behind stay charged for this long; the oracle waits for it.
            ("TANDEM_KV_LEASE_SECONDS", "1".to_owned()),
            ("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", "1000".to_owned()),
        ];
        match dialect {
            Dialect::VllmMooncake => env.push(("AIBRIX_MOONCAKE_BOOTSTRAP_PORT", bootstrap.to_string())),
            Dialect::TrtGenerationFirst => env.push(("AIBRIX_TRT_SCHEDULE_STYLE", "generation_first".to_owned())),
            _ => {}
        }
        env.extend(more.iter().map(|(name, value)| (*name, (*value).to_owned())));
        let env = env.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let fleet = Fleet::start(pods, FleetOptions { replicas: 1, env, ..FleetOptions::default() }).await;
        Stage { dialect, prefill, decode, fleet, _nobody: nobody }
    }

    pub fn engines(&self) -> [&Engine; 2] {
        [&self.prefill, &self.decode]
    }
}

fn profile() -> serde_json::Value {
    let seconds = WATCHDOG.as_secs();
    json!({"profiles": {"default": {"routingStrategy": "pd", "routingConfig": {
        // Policies that charge tokens, so that the oracle has more to look at.
        "prefillScorePolicy": "token_load", "decodeScorePolicy": "token_load",
        "pd": {
            "decodeFirstResponseTimeout": seconds, "decodeResponseTimeout": seconds, "decodeStreamIdleTimeout": seconds,
        },
    }}}})
}

fn engine_of(dialect: Dialect, pod: PodManifest, bootstrap: u16) -> PodManifest {
    match dialect {
        Dialect::VllmShfs => pod.engine("vllm"),
        Dialect::VllmMooncake => pod.engine("vllm").label("model.aibrix.ai/kv-connector-type", "mooncake"),
        Dialect::Sglang => {
            pod.engine("sglang").annotation("model.aibrix.ai/sglang-bootstrap-port", &bootstrap.to_string())
        }
        Dialect::TrtContextFirst | Dialect::TrtGenerationFirst => pod.engine("trtllm"),
    }
}

/// The requests of a cell at an engine, in the order of arrival.
pub fn records(engine: &Engine, tag: &str) -> Vec<Record> {
    engine.records_where(|record| record.path.starts_with("/v1/") && record.header("x-cell") == Some(tag))
}

/// Waits until an engine has a request of a cell that satisfies `condition`.
pub async fn arrives(engine: &Engine, tag: &str, condition: impl Fn(&Record) -> bool) {
    engine.wait_until(|engine| records(engine, tag).iter().any(&condition)).await;
}
