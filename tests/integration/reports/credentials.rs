//! Reports: the token that opens the gateway went on to every engine, and into the engines' logs.

use tandem_sim::{EngineConfig, Record};

use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::Call;

const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"m","messages":[{"role":"user","content":"let me in"}],"max_tokens":2}"#;
const TOKEN: &str = "the-gateways-token";
const KEY: &str = "the-engines-key";

/// `authorization` of every request to an engine about the body above, once for each engine.
fn shown(sandbox: &Sandbox) -> Vec<Option<String>> {
    let records: Vec<Record> = sandbox.engines().flat_map(tandem_sim::Engine::records).collect();
    assert!(records.iter().all(|record| record.headers.iter().filter(|(name, _)| name == "authorization").count() < 2));
    records.iter().map(|record| record.header("authorization").map(str::to_owned)).collect()
}

/// Both ways in, with a pair of pods and with one pod.
async fn ask(sandbox: &Sandbox, authorization: Option<&str>) -> Vec<Option<String>> {
    sandbox.clear();
    for path in sandbox.paths() {
        for strategy in ["pd", "random"] {
            let call = Call::post(&path, CHAT, BODY).header("routing-strategy", strategy);
            let call = authorization.iter().fold(call, |call, value| call.header("authorization", value));
            assert_eq!(call.send().await.status, 200, "{path} {strategy}");
        }
    }
    shown(sandbox)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_gateways_token_ends_at_the_gateway() {
    let sandbox = Sandbox::start(SandboxOptions::default().env(&[("AIBRIX_AUTH_BEARER_TOKEN", TOKEN)])).await;
    let seen = ask(&sandbox, Some(&format!("Bearer {TOKEN}"))).await;
    assert_eq!(seen, vec![None; 6]);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_token_of_the_gateway_clients_credentials_are_the_engines_business() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    let seen = ask(&sandbox, Some("Bearer somebody")).await;
    assert_eq!(seen, vec![Some("Bearer somebody".to_owned()); 6]);
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_setting_forwards_the_token_and_another_gives_engines_their_own() {
    let forwarded = [("AIBRIX_AUTH_BEARER_TOKEN", TOKEN), ("TANDEM_FORWARD_AUTH_TOKEN", "true")];
    let sandbox = Sandbox::start(SandboxOptions::default().env(&forwarded)).await;
    let bearer = format!("Bearer {TOKEN}");
    assert_eq!(ask(&sandbox, Some(&bearer)).await, vec![Some(bearer.clone()); 6]);
    sandbox.close().await;

    for own in
        [&[("TANDEM_ENGINE_API_KEY", KEY), ("AIBRIX_AUTH_BEARER_TOKEN", TOKEN)][..], &[("TANDEM_ENGINE_API_KEY", KEY)]]
    {
        let sandbox = Sandbox::start(SandboxOptions::default().env(own)).await;
        assert_eq!(ask(&sandbox, Some(&bearer)).await, vec![Some(format!("Bearer {KEY}")); 6]);
        for tandem in &sandbox.fleet.tandems {
            let logs = tandem.process().stdout() + &tandem.process().stderr();
            assert!(!logs.contains(KEY) && !logs.contains(TOKEN), "a secret is in the log");
            assert!(logs.contains("TANDEM_ENGINE_API_KEY"), "the setting is reported");
        }
        sandbox.close().await;
    }
}

/// An engine with a key of its own wants it with every call: aborts and questions too.
#[tokio::test(flavor = "multi_thread")]
async fn calls_that_are_no_legs_show_the_engines_key_as_well() {
    let mut options = SandboxOptions::of(EngineConfig::trtllm);
    options.fleet.replicas = 1;
    let options = options.env(&[("TANDEM_ENGINE_API_KEY", KEY), ("AIBRIX_TRT_SCHEDULE_STYLE", "generation_first")]);
    let sandbox = Sandbox::start(options).await;
    let path = &sandbox.paths()[0];
    assert_eq!(Call::post(path, CHAT, BODY).send().await.status, 200);
    let questions = sandbox.prefill[0].records_for("/server_info");
    assert_eq!(questions.len(), 1);
    assert_eq!(questions[0].header("authorization"), Some(format!("Bearer {KEY}").as_str()));
    sandbox.close().await;

    let mut options = SandboxOptions::of(EngineConfig::sglang);
    options.fleet.replicas = 1;
    let sandbox = Sandbox::start(options.env(&[("TANDEM_ENGINE_API_KEY", KEY)])).await;
    let path = &sandbox.paths()[0];
    let (prefill, decode) = (&sandbox.prefill[0], &sandbox.decode[0]);
    let hold = decode.hold();
    prefill.script(tandem_sim::Fault::on("/v1/").answer(500, "application/json", "{}"));
    assert_eq!(Call::post(path, CHAT, BODY).send().await.status, 500);
    let told = |engine: &tandem_sim::Engine| !engine.records_for("/abort_request").is_empty();
    crate::harness::within("the decode pod is told", decode.wait_until(told)).await;
    hold.release();
    let aborts = decode.records_for("/abort_request");
    assert_eq!(aborts[0].header("authorization"), Some(format!("Bearer {KEY}").as_str()));
    sandbox.close().await;
}
