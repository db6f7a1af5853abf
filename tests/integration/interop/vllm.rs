//! Cases 1 to 17: vLLM.

use serde_json::{Value, json};

use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::http::Call;

#[tokio::test(flavor = "multi_thread")]
async fn interop_01_plain_chat() {
    let sandbox = Sandbox::start(SandboxOptions::default()).await;
    for path in sandbox.paths() {
        sandbox.clear();
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 64});
        let answer = Call::post(&path, "/v1/chat/completions", body.to_string()).send().await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("target-pod"), "d0");
        assert_eq!(answer.header("prefill-target-pod"), "p0");
        assert_eq!(answer.header("routing-strategy"), "pd");
        let request_id = answer.header("request-id").to_owned();
        let answered = answer.json().await;
        assert_eq!(answered["usage"]["completion_tokens"], 64);

        let (prefill, decode) = (only(&sandbox.prefill[0]), only(&sandbox.decode[0]));
        let (p, d) = (prefill.json(), decode.json());
        assert_eq!(
            (&p["max_tokens"], &p["max_completion_tokens"], &p["stream"]),
            (&json!(1), &json!(1), &json!(false))
        );
        assert_eq!(
            p["kv_transfer_params"],
            json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
                "remote_block_ids": null, "remote_host": null, "remote_port": null})
        );
        assert_eq!(d["kv_transfer_params"]["remote_host"], "127.0.0.1");
        assert_eq!((&d["max_tokens"], &d["stream"]), (&json!(64), &Value::Null));
        assert_eq!(prefill.header("x-request-id"), Some(request_id.as_str()));
        assert_eq!(decode.header("x-request-id"), Some(request_id.as_str()));
    }
    sandbox.close().await;
}
