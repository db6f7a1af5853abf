//! The interop cases of the engine protocols, each through real Envoy and through the HTTP front, against strict
//! simulated engines.

mod aibrix;
mod failover;
mod leaving;
mod mooncake;
mod prefill_failures;
mod retries;
mod several;
mod sglang;
mod sglang_failures;
mod trtllm;
mod trtllm_generation_first;
mod unsplittable;
mod vllm;
mod vllm_handoff;

use tandem_sim::{Engine, Record};

use crate::harness::within;

/// The only request for text that an engine has recorded. (It is also asked about itself, and told to abort.)
fn only_work(engine: &Engine) -> Record {
    let records = work(engine);
    assert_eq!(records.len(), 1, "{records:?}");
    records.into_iter().next().expect("one record")
}

fn work(engine: &Engine) -> Vec<Record> {
    let is_work = |record: &Record| record.path.starts_with("/v1/") || record.path.starts_with("/generate");
    engine.records().into_iter().filter(is_work).collect()
}

/// Waits until an engine's only request for text has ended.
async fn ended(engine: &Engine) -> Record {
    within("the leg ends", engine.wait_until(|engine| work(engine).iter().any(|record| record.end.is_some()))).await;
    only_work(engine)
}

/// Waits until an engine has answered this many calls on `path`.
async fn calls(engine: &Engine, path: &str, count: usize) -> Vec<Record> {
    let answered = |engine: &Engine| engine.records_for(path).iter().filter(|call| call.end.is_some()).count();
    within(path, engine.wait_until(|engine| answered(engine) >= count)).await;
    engine.records_for(path)
}
