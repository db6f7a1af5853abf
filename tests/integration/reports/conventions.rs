//! One API's conventions with another's: keys, ids of callers, failure events, endpoints that one pod serves, single models.

use bytes::Bytes;
use tandem_sim::Fault;

use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::{Call, base};

const MESSAGES: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":2}"#;

#[tokio::test(flavor = "multi_thread")]
async fn the_messages_api_sends_its_key_in_a_header_of_its_own() {
    const TOKEN: &str = "sk-of-the-gateway-4711";
    let sandbox = Sandbox::start(SandboxOptions::default().env(&[("AIBRIX_AUTH_BEARER_TOKEN", TOKEN)])).await;
    for path in sandbox.paths() {
        sandbox.clear();
        let answer = Call::post(&path, "/v1/messages", MESSAGES).header("x-api-key", TOKEN).send().await;
        assert_eq!(answer.status, 200);
        assert!(answer.body().await.complete);
        for engine in [&sandbox.prefill[0], &sandbox.decode[0]] {
            let record = only(engine);
            let told = record.headers.iter().any(|(_, value)| value.contains(TOKEN));
            assert!(!told, "{:?}", record.headers);
        }
        for (endpoint, key) in [("/v1/messages", "wrong"), ("/v1/completions", TOKEN)] {
            let answer = Call::post(&path, endpoint, MESSAGES).header("x-api-key", key).send().await;
            assert_eq!(answer.status, 401, "{endpoint}");
        }
    }
    for tandem in &sandbox.fleet.tandems {
        assert!(!(tandem.process().stdout() + &tandem.process().stderr()).contains(TOKEN));
    }
    sandbox.clear();
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_callers_id_is_echoed_and_logged_beside_ours() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    let body = r#"{"model":"m","prompt":"x","max_tokens":2}"#;
    for (number, path) in sandbox.paths().iter().enumerate() {
        let id = format!("caller-{number}");
        let answer = Call::post(path, "/v1/completions", body).header("x-request-id", &id).send().await;
        assert_eq!((answer.status.as_u16(), answer.header("x-request-id")), (200, id.as_str()), "{path}");
        let ours = answer.header("request-id").to_owned();
        assert!(!ours.is_empty() && ours != id);
        assert!(answer.body().await.complete);
        let refused = Call::post(path, "/v1/completions", "[]").header("x-request-id", &id).send().await;
        assert_eq!((refused.status.as_u16(), refused.header("x-request-id")), (400, id.as_str()));
        let answer = Call::post(path, "/v1/completions", body).send().await;
        assert_eq!(answer.header("x-request-id"), "", "{path}: nobody called it anything");
        assert!(answer.body().await.complete);
        // Not printable, or long: not repeated.
        let long = "x".repeat(200);
        let answer = Call::post(path, "/v1/completions", body).header("x-request-id", &long).send().await;
        assert_ne!(answer.header("x-request-id"), long);
        assert!(answer.body().await.complete);
        let line = sandbox.fleet.tandems.iter().find_map(|tandem| {
            let logs = tandem.process().stdout() + &tandem.process().stderr();
            logs.lines().find(|line| line.contains(&ours) && line.contains("request ended")).map(str::to_owned)
        });
        assert!(line.as_deref().is_some_and(|line| line.contains(&id)), "{line:?}");
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_apis_own_failure_event_ends_the_stream_well() {
    let sandbox = Sandbox::start(SandboxOptions { pairs: 0, combined: 1, ..SandboxOptions::default() }).await;
    let start = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"content\":[]}}\n\n";
    let delta = "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"text\":\"a\"}}\n\n";
    let error =
        "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"m\"}}\n\n";
    let failed =
        "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"x\"}}}\n\n";
    let generic = "data: {\"error\":{\"message\":\"m\",\"code\":500}}\n\n";
    for base in sandbox.paths() {
        for (path, stream, passed, complete) in [
            ("/v1/messages", [start, delta, error].concat(), [start, delta, error].concat(), true),
            // What would look like a good end after it is left out.
            ("/v1/messages", [delta, error, "data: [DONE]\n\n"].concat(), [delta, error].concat(), true),
            ("/v1/responses", failed.to_owned(), failed.to_owned(), true),
            ("/v1/chat/completions", [generic, "data: [DONE]\n\n"].concat(), generic.to_owned(), false),
        ] {
            for writes in [1, 64] {
                let size = stream.len().div_ceil(writes);
                let pieces = stream.as_bytes().chunks(size).map(Bytes::copy_from_slice).collect();
                sandbox.combined[0].script(Fault::on(path).stream(pieces));
                let body = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"input":"x","max_tokens":2,"stream":true}"#;
                let answer = Call::post(&base, path, body).send().await.body().await;
                assert_eq!(String::from_utf8_lossy(&answer.bytes), passed, "{base}{path}");
                assert_eq!(answer.complete, complete, "{base}{path} in {writes}");
            }
        }
    }
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_that_one_pod_serves_reach_one_pod() {
    let sandbox = Sandbox::start(SandboxOptions { combined: 1, ..SandboxOptions::default() }).await;
    for base in sandbox.paths() {
        for (path, body) in [
            ("/v1/messages/count_tokens", r#"{"model":"m","messages":[{"role":"user","content":"x"}]}"#),
            ("/v1/responses/input_tokens", r#"{"model":"m","input":"x"}"#),
            ("/tokenize", r#"{"model":"m","prompt":"x"}"#),
            ("/detokenize", r#"{"model":"m","tokens":[1]}"#),
            ("/v1/score", r#"{"model":"m","text_1":"a","text_2":"b"}"#),
            ("/score", r#"{"model":"m","text_1":"a","text_2":"b"}"#),
            ("/rerank", r#"{"model":"m","query":"a","documents":["b"]}"#),
            ("/v1/rerank", r#"{"model":"m","query":"a","documents":["b"]}"#),
            ("/v2/rerank", r#"{"model":"m","query":"a","documents":["b"]}"#),
            ("/classify", r#"{"model":"m","input":"a"}"#),
            ("/pooling", r#"{"model":"m","input":"a"}"#),
            ("/v1/audio/speech", r#"{"model":"m","input":"a","voice":"v"}"#),
        ] {
            sandbox.clear();
            for engine in sandbox.engines() {
                engine.clear_faults();
                engine.script(Fault::on(path).answer(200, "application/json", r#"{"served":true}"#));
            }
            let answer = Call::post(&base, path, body).send().await;
            assert_eq!(answer.status, 200, "{base}{path}");
            assert_eq!(answer.json().await["served"], true);
            let served: Vec<_> = sandbox.engines().flat_map(|engine| engine.records_for(path)).collect();
            assert_eq!(served.len(), 1, "{path}");
            assert_eq!(served[0].body, body.as_bytes(), "{path}: as it was sent");
        }
    }
    sandbox.engines().for_each(tandem_sim::Engine::clear_faults);
    sandbox.clear();
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_can_be_looked_up() {
    let sandbox = Sandbox::start(SandboxOptions {
        pairs: 0,
        combined: 1,
        pod: |pod| pod.label("model.aibrix.ai/name", "m"),
        ..SandboxOptions::default()
    })
    .await;
    let mut bases = sandbox.paths();
    bases.extend(sandbox.fleet.tandems.iter().map(|tandem| base(tandem.http())));
    for base in bases {
        let answer = Call::get(&base, "/v1/models/m").send().await;
        assert_eq!(answer.status, 200, "{base}");
        let model = answer.json().await;
        assert_eq!((model["id"].as_str(), model["object"].as_str()), (Some("m"), Some("model")));
        let answer = Call::get(&base, "/v1/models/org%2Fother").send().await;
        assert_eq!(answer.status, 404, "{base}");
        let error = answer.json().await;
        assert_eq!(error["error"]["code"], "model_not_found");
        assert!(error["error"]["message"].as_str().is_some_and(|text| text.contains("org/other")), "{error}");
    }
    sandbox.close().await;
}
