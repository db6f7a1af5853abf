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

/// Answers are compared with those of a server that is given no time at all for anything else: half a minute is plenty
/// for a tiny model, and some engines take as long to give up a dead peer.
const PATIENCE: Duration = Duration::from_secs(60);

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
