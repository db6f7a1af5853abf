//! The front passes reasoning on as it comes, and holds nothing where a request cannot start over.

use bytes::Bytes;
use tandem_sim::Fault;
use tokio::time::Duration;

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::{Call, base};

const PATH: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}"#;
const ROLE: &str = "data: {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n";
const END: &str = "data: [DONE]\n\n";

fn delta(members: &str) -> String {
    format!(
        "data: {{\"choices\":[{{\"index\":0,\"delta\":{{{members}}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
    )
}

async fn sandbox(pairs: usize, engine: fn(tandem_sim::EngineConfig) -> tandem_sim::EngineConfig) -> Sandbox {
    let fleet = FleetOptions { replicas: 1, envoy: false, ..FleetOptions::default() };
    Sandbox::start(SandboxOptions { pairs, engine, fleet, ..SandboxOptions::default() }).await
}

/// The engine writes `first`, and the rest only a long time after; the client sees `first` at once.
async fn arrives_at_once(sandbox: &Sandbox, first: &str) {
    let front = base(sandbox.fleet.tandems[0].front().expect("a front"));
    for engine in &sandbox.decode {
        engine.clear_faults();
        let writes = vec![Bytes::copy_from_slice(first.as_bytes()), Bytes::from_static(END.as_bytes())];
        engine.script(Fault { piece_pause: Duration::from_secs(5), ..Fault::on(PATH).stream(writes) });
    }
    let begun = tokio::time::Instant::now();
    let mut answer = Call::post(&front, PATH, BODY).send().await;
    let chunk = answer.chunk().await.expect("a chunk").expect("bytes");
    let waited = begun.elapsed();
    assert!(first.as_bytes().starts_with(&chunk), "{chunk:?}");
    assert!(waited < Duration::from_secs(4), "{first}: {waited:?}");
    assert!(answer.body().await.complete);
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_is_generated_is_passed_on_at_once() {
    let sandbox = sandbox(2, |config| config).await;
    for members in [
        r#""reasoning_content":"hm""#,
        r#""role":"assistant","content":"","reasoning":"hm""#,
        r#""role":"assistant","content":null,"tool_calls":[{"index":0,"id":"t","function":{"name":"f"}}]"#,
        r#""role":"assistant","content":"","refusal":"no""#,
        r#""role":"assistant","audio":{"id":"a"}"#,
    ] {
        arrives_at_once(&sandbox, &(ROLE.to_owned() + &delta(members))).await;
    }
    sandbox.engines().for_each(tandem_sim::Engine::clear_faults);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_held_where_no_second_attempt_is_possible() {
    let sandbox = sandbox(1, |config| config).await;
    arrives_at_once(&sandbox, ROLE).await;
    sandbox.engines().for_each(tandem_sim::Engine::clear_faults);
    sandbox.close().await;
}
