//! Every reply of the reference gateway's section 1.2, message by message.

use std::time::Duration;

use envoy_types::pb::envoy::service::ext_proc::v3 as pb;
use pb::processing_request::Request as Message;
use pb::processing_response::Response as PbReply;
use serde_json::{Value, json};
use tonic::Code;

use super::{bare, chat, chat_head, fleet_shows, routed, sse_head, start};
use crate::harness::engines::{SandboxOptions, only};
use crate::harness::ext_proc::{Head, Mutation, Reply};
use crate::harness::pods::PodManifest;
use crate::harness::within;

fn texts(mutation: &Mutation) -> Vec<(&str, String)> {
    mutation.set.iter().map(|(name, value)| (name.as_str(), String::from_utf8_lossy(value).into_owned())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pair_request_gets_every_reply_in_order() {
    let (sandbox, client) = start(bare(&[("AIBRIX_PREFILL_REQUEST_TIMEOUT", "20")])).await;
    let (prefill, decode) = (&sandbox.prefill[0], sandbox.decode[0].address().to_string());
    let body = chat(true);

    let mut stream = client.open(&[]);
    let forged =
        ["target-pod", "X-Gateway-Destination-Endpoint", "x-data-parallel-rank", "x-override-rid", "x-trtllm-a"];
    let head = chat_head().raw("content-length", body.len().to_string().as_bytes()).raw("x-request-id", b"mine");
    let head = forged.iter().fold(head, |head, name| head.raw(name, b"10.9.9.9:1"));
    stream.request_headers(head.raw("routing-strategy", b"pd").raw("model", b"other"), false).await;
    let Reply::RequestHeaders(mut reply) = stream.next().await else { panic!("no reply to the head") };
    assert_eq!(texts(&reply), [("x-went-into-req-headers", "true".to_owned())]);
    assert!(reply.clear_route_cache && reply.body.is_none() && !reply.replace);
    reply.remove.sort();
    let mut names: Vec<String> = forged.iter().map(|name| name.to_ascii_lowercase()).collect();
    names.extend(["routing-strategy".to_owned(), "model".to_owned()]);
    names.sort();
    assert_eq!(reply.remove, names);

    let hold = prefill.hold();
    stream.request_body(&body, true).await;
    // Before the leg runs, Envoy is asked for the leg's time and a margin.
    let Reply::MoreTime(more) = stream.next().await else { panic!("no request for more time") };
    assert!(more > Duration::from_secs(20) && more < Duration::from_secs(30), "{more:?}");
    within("the leg", hold.wait_for(1)).await;
    assert!(stream.try_next().is_none(), "nothing is decided while the leg runs");
    hold.release();
    let Reply::RequestBody(reply) = stream.next().await else { panic!("no reply to the body") };
    assert!(reply.clear_route_cache && reply.remove.is_empty() && !reply.replace);
    let sent = reply.body.clone().expect("a body");
    let id = reply.header("x-request-id").expect("an id");
    assert_eq!(
        texts(&reply),
        [
            ("routing-strategy", "pd".to_owned()),
            ("target-pod", decode.clone()),
            ("x-request-id", id.clone()),
            ("content-length", sent.len().to_string()),
        ]
    );
    let mut object: Value = serde_json::from_slice(&sent).unwrap();
    let handoff = object.as_object_mut().unwrap().remove("kv_transfer_params").expect("a hand-off");
    assert_eq!(handoff["remote_host"], "127.0.0.1");
    assert_eq!(object, serde_json::from_slice::<Value>(&body).unwrap(), "all else is the client's");
    let leg = only(prefill);
    assert_eq!((leg.header("x-request-id"), leg.path.as_str()), (Some(id.as_str()), super::CHAT));
    let leaked = leg.headers.iter().find(|(name, value)| names.contains(name) || value.contains("10.9.9.9"));
    assert_eq!(leaked, None);

    stream.response_headers(sse_head(), false).await;
    let Reply::ResponseHeaders(reply) = stream.next().await else { panic!("no reply to the answer's head") };
    assert_eq!(
        texts(&reply),
        [
            ("x-went-into-req-headers", "true".to_owned()),
            ("request-id", id.clone()),
            ("x-request-id", "mine".to_owned()),
            ("routing-strategy", "pd".to_owned()),
            ("target-pod", "d0".to_owned()),
            ("target-pod-ip", decode.clone()),
            ("prefill-target-pod", "p0".to_owned()),
            ("prefill-target-pod-ip", "127.0.0.1".to_owned()),
        ]
    );
    assert!(reply.body.is_none() && reply.remove.is_empty() && reply.response_body_mode.is_none());
    for (chunk, last) in [(&b"data: {\"choices\":[]}\n\n"[..], false), (b"data: [DONE]\n\n", false), (b"", true)] {
        stream.response_body(chunk, last).await;
        let Reply::ResponseBody(reply) = stream.next().await else { panic!("no reply to a chunk") };
        assert_eq!(reply, Mutation::default(), "chunks pass as they are");
    }
    assert!(matches!(stream.next().await, Reply::End(Code::Ok, _)));
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_without_a_prefill_leg_ask_for_no_time() {
    let (mut sandbox, client) = start(SandboxOptions { combined: 1, ..bare(&[]) }).await;
    // Several choices cannot be handed from pod to pod: the combined pod takes them.
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 2}).to_string();
    let mut stream = client.open(&[]);
    stream.request_headers(chat_head(), false).await;
    stream.next().await.mutation();
    stream.request_body(body.as_bytes(), true).await;
    let Reply::RequestBody(reply) = stream.next().await else { panic!("no reply to the body") };
    assert_eq!(reply.header("target-pod"), Some(sandbox.combined[0].address().to_string()));
    assert_eq!(reply.body.as_deref(), Some(body.as_bytes()), "not a byte changes");
    stream.response_headers(Head::status(200).raw("content-type", b"application/json"), false).await;
    let reply = stream.next().await.mutation();
    assert_eq!(reply.header("target-pod").as_deref(), Some("c0"));
    assert_eq!(reply.header("prefill-target-pod"), None);
    stream.response_body(b"{}", true).await;
    stream.next().await.mutation();
    assert!(matches!(stream.next().await, Reply::End(Code::Ok, _)));

    // Without any strategy Envoy's own routes choose, by the model's name.
    let pod = PodManifest::new("plain-0", "plain", sandbox.combined[0].address());
    sandbox.fleet.pods.put([pod]);
    fleet_shows(&sandbox.fleet.tandems[0], "the new model", |page| page["models"]["plain"].is_object()).await;
    let body = json!({"model": "plain", "messages": [{"role": "user", "content": "x"}]}).to_string();
    let (mut stream, reply) = routed(&client, chat_head().raw("target-pod", b"10.9.9.9:1"), body.as_bytes()).await;
    let names: Vec<&str> = reply.set.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["model", "x-request-id", "content-length"]);
    assert_eq!(reply.header("model").as_deref(), Some("plain"));
    assert!(reply.clear_route_cache);
    stream.response_headers(Head::status(404), true).await;
    let reply = stream.next().await.mutation();
    let names: Vec<&str> = reply.set.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["x-went-into-req-headers", "request-id"]);
    assert!(matches!(stream.next().await, Reply::End(Code::Ok, _)));
    sandbox.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn trailers_are_answered_and_end_the_answer() {
    let (sandbox, client) = start(bare(&[])).await;
    let (mut stream, _) = routed(&client, chat_head(), &chat(true)).await;
    stream.send(Message::RequestTrailers(pb::HttpTrailers::default())).await;
    let Reply::Other(reply) = stream.next().await else { panic!("no reply to request trailers") };
    assert!(matches!(reply.response, Some(PbReply::RequestTrailers(_))), "{reply:?}");
    stream.response_headers(sse_head(), false).await;
    stream.next().await.mutation();
    stream.response_body(b"data: {\"choices\":[]}\n\n", false).await;
    stream.next().await.mutation();
    stream.send(Message::ResponseTrailers(pb::HttpTrailers::default())).await;
    let Reply::Other(reply) = stream.next().await else { panic!("no reply to response trailers") };
    assert!(matches!(reply.response, Some(PbReply::ResponseTrailers(_))), "{reply:?}");
    assert!(matches!(stream.next().await, Reply::End(Code::Ok, _)), "one reply, then the end");
    let metrics = sandbox.fleet.tandems[0].metrics().await;
    assert_eq!(metrics.sum("gateway_request_model_success_total", &[]), 1.0);
    sandbox.close().await;
}
