//! Real engines behind the gateway: opt-in, because they take gigabytes and minutes. `docs/real-engines.md` says how.
//!
//! One test for each engine starts its servers once, by the script in `tests/real/`, and runs its scenarios one after
//! the other. Without the engine's variable the test says that it was skipped.

mod answers;
mod relay;
mod servers;
mod sglang;
mod vllm;

use std::future::Future;
use std::time::{Duration, Instant};

use crate::harness::fleet::FleetOptions;

/// Longest wait for a server. A tiny model answers within a second, but engines keep several processes busy, and the
/// machine may have other work.
const PATIENCE: Duration = Duration::from_mins(2);

/// Two replicas and Envoy. Real servers take a while to write their metrics, and their processors are needed elsewhere:
/// they are asked every two seconds.
fn options() -> FleetOptions {
    let slowly = [("AIBRIX_POD_METRIC_REFRESH_INTERVAL_MS", "2000"), ("TANDEM_SCRAPE_TIMEOUT_MS", "10000")];
    let env = slowly.map(|(name, value)| (name.to_owned(), value.to_owned()));
    FleetOptions { env: env.into(), ..FleetOptions::default() }
}

/// Whether the developer asked for the engine whose variable this is.
fn asked_for(variable: &str) -> bool {
    let asked = std::env::var(variable).is_ok_and(|value| value == "1");
    if !asked {
        println!("skipped: needs real servers, set {variable}=1 (docs/real-engines.md)");
    }
    asked
}

/// Runs one scenario and says how long it took. `TANDEM_REAL_SCENARIO` selects those whose name contains its value.
async fn scenario(name: &str, run: impl Future<Output = ()>) {
    if std::env::var("TANDEM_REAL_SCENARIO").is_ok_and(|wanted| !name.contains(&wanted)) {
        println!("{name}: not selected");
        return;
    }
    println!("{name} ...");
    let since = Instant::now();
    run.await;
    println!("{name}: holds, {:.1} s", since.elapsed().as_secs_f64());
}
