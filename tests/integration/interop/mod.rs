//! The interop cases of the engine protocols, each through real Envoy and through the HTTP front, against strict
//! simulated engines.

mod leaving;
mod mooncake;
mod prefill_failures;
mod several;
mod sglang;
mod sglang_failures;
mod trtllm;
mod trtllm_generation_first;
mod vllm;
mod vllm_handoff;

use tandem_sim::{Engine, Record};

use crate::harness::within;

/// The only request for text that an engine has recorded. (It is also asked about itself, and told to abort.)
fn only_work(engine: &Engine) -> Record {
    let is_work = |record: &Record| record.path.starts_with("/v1/") || record.path.starts_with("/generate");
    let records: Vec<Record> = engine.records().into_iter().filter(is_work).collect();
    assert_eq!(records.len(), 1, "{records:?}");
    records.into_iter().next().expect("one record")
}

/// Waits until an engine's only request for text has ended.
async fn ended(engine: &Engine) -> Record {
    within("the leg ends", engine.wait_until(|engine| only_work(engine).end.is_some())).await;
    only_work(engine)
}

/// Waits until an engine was called on `path` this often.
async fn calls(engine: &Engine, path: &str, count: usize) -> Vec<Record> {
    within(path, engine.wait_until(|engine| engine.records_for(path).len() >= count)).await;
    engine.records_for(path)
}
