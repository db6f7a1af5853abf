//! The exact tree of what goes wrong: a second attempt, the watchdog, aborts, a client that leaves.

use std::time::Duration;

use tandem_sim::{Engine, EngineConfig, Fault};

use super::{
    ABORT, ANSWER, BODY, CHAT, DECODE, ERROR, FIRST, HEAD, INFERENCE, OTHERS, PARENT, PREFILL, Protocol, SELECT,
    STREAMED, UNSET, all, assert_attributes, chat, exporting, gathered, one, received, traceparent,
};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::Call;
use crate::harness::otlp::{Collector, Span};
use crate::harness::within;

const PROTOCOLS: [Protocol; 2] = [Protocol::Grpc, Protocol::Http];

fn call(path: &str, trace: &str, stream: bool) -> Call {
    Call::post(path, CHAT, chat(stream)).header("traceparent", &traceparent(trace, PARENT))
}

fn trace(number: usize) -> String {
    format!("{number:032x}")
}

/// The span that a call at an engine named as its parent.
fn parents(engine: &Engine, path: &str) -> Vec<String> {
    engine.records_where(|record| record.path.starts_with(path)).iter().map(|record| received(record).1).collect()
}

fn moment<'a>(span: &'a Span, name: &str) -> &'a std::collections::BTreeMap<String, String> {
    let found = span.moments.iter().find(|moment| moment.name == name);
    &found.unwrap_or_else(|| panic!("{name} of {span:?}")).attributes
}

/// R88: the legs of a second attempt are siblings of those of the first.
#[tokio::test(flavor = "multi_thread")]
async fn r88_a_second_attempt_is_a_sibling() {
    for protocol in PROTOCOLS {
        let collector = Collector::start().await;
        let fleet = exporting(&collector, protocol, &[("TANDEM_EJECTION_FAILURES", "0")]);
        let sandbox = Sandbox::start(SandboxOptions { pairs: 2, fleet, ..SandboxOptions::default() }).await;
        let path = sandbox.paths().remove(0);
        // Connections that live on would hide that nobody listens any more.
        for prefill in &sandbox.prefill {
            prefill.script(Fault::on("/v1/").close_connection().always());
        }
        // Both decode pods report an error before they generate anything.
        for decode in &sandbox.decode {
            decode.script(Fault::on("/v1/").error_event_after(0).always());
        }
        let answer = call(&path, &trace(1), true).send().await;
        assert_eq!(answer.status, 502);
        let children = [HEAD, BODY, SELECT, PREFILL, DECODE, ANSWER, INFERENCE, FIRST, OTHERS];
        let second = [PREFILL, DECODE, ANSWER, INFERENCE, FIRST, OTHERS];
        let spans = gathered(&collector, &trace(1), PARENT, &[&children[..], &second].concat()).await;
        let (prefills, decodes) = (all(&spans, PREFILL), all(&spans, DECODE));
        for legs in [&prefills, &decodes] {
            assert!(!legs[0].attributes.contains_key("http.request.resend_count"));
            assert_attributes(legs[1], &[("http.request.resend_count", "1")]);
            assert_ne!(legs[0].attributes["k8s.pod.name"], legs[1].attributes["k8s.pod.name"]);
        }
        assert!(prefills.iter().all(|span| span.status == UNSET) && decodes.iter().all(|span| span.status == ERROR));
        assert_attributes(decodes[0], &[("error.type", "error_before_content")]);
        let root = one(&spans, "tandem.request");
        assert_eq!(moment(root, "retry")["reason"], "error_before_content");
        assert_attributes(root, &[("tandem.retry", "error_before_content"), ("outcome", "pd_decode_failure")]);
        // Each engine got the span of its own leg.
        let mut told: Vec<String> = sandbox.engines().flat_map(|engine| parents(engine, "/v1/")).collect();
        let mut ids: Vec<String> = prefills.iter().chain(&decodes).map(|span| span.span_id.clone()).collect();
        told.sort_unstable();
        ids.sort_unstable();
        assert_eq!(told, ids);

        // Neither prefill pod can be connected to.
        sandbox.decode.iter().for_each(Engine::clear_faults);
        for prefill in &sandbox.prefill {
            prefill.pause_listening().await;
        }
        let answer = call(&path, &trace(2), true).send().await;
        assert_eq!(answer.status, 503);
        let spans = gathered(&collector, &trace(2), PARENT, &[HEAD, BODY, SELECT, PREFILL, PREFILL]).await;
        for leg in all(&spans, PREFILL) {
            assert_eq!(leg.status, ERROR);
            assert_attributes(leg, &[("error.type", "transport")]);
        }
        assert_eq!(moment(one(&spans, "tandem.request"), "retry")["reason"], "prefill_unreachable");
        for prefill in &sandbox.prefill {
            prefill.resume_listening().await.expect("the port is still free");
        }
        sandbox.close().await;
    }
}

/// The decode pod says nothing after its head: the watchdog ends the request, and the pod is told to drop it.
#[tokio::test(flavor = "multi_thread")]
async fn r88_the_watchdog_and_its_abort() {
    for protocol in PROTOCOLS {
        let collector = Collector::start().await;
        let env = [("AIBRIX_DECODE_FIRST_RESPONSE_TIMEOUT", "0.4"), ("TANDEM_EJECTION_FAILURES", "1")];
        let fleet = exporting(&collector, protocol, &env);
        let options = SandboxOptions { pairs: 2, fleet, ..SandboxOptions::of(EngineConfig::sglang) };
        let sandbox = Sandbox::start(options).await;
        let path = sandbox.paths().remove(0);
        for decode in &sandbox.decode {
            decode.script(Fault::on("/v1/").stall_after(0));
        }
        let answer = call(&path, &trace(3), true).send().await;
        assert_eq!(answer.status, 504);
        let children = [HEAD, BODY, SELECT, PREFILL, DECODE, ANSWER, INFERENCE, FIRST, ABORT];
        let spans = gathered(&collector, &trace(3), PARENT, &children).await;
        let (root, decode, abort) = (one(&spans, "tandem.request"), one(&spans, DECODE), one(&spans, ABORT));
        assert_eq!(moment(root, "decode watchdog")["phase"], "first_response");
        assert!(moment(root, "ejected after failures in a row").contains_key("pod"));
        assert_attributes(root, &[("outcome", "pd_decode_watchdog"), ("error.type", "pd_decode_watchdog")]);
        assert_abort(&sandbox, abort, decode, "watchdog_first_response");
        sandbox.close().await;
    }
}

/// The abort call hangs under the request, is linked to its leg, and tells the engine who it is.
fn assert_abort(sandbox: &Sandbox, abort: &Span, leg: &Span, trigger: &str) {
    assert_eq!(abort.links, [(leg.trace_id.clone(), leg.span_id.clone())]);
    assert_attributes(
        abort,
        &[
            ("tandem.abort.trigger", trigger),
            ("http.request.method", "POST"),
            ("http.response.status_code", "200"),
            ("server.port", &leg.attributes["server.port"]),
        ],
    );
    assert!(abort.attributes["url.full"].ends_with("/abort_request"));
    let told: Vec<String> = sandbox.engines().flat_map(|engine| parents(engine, "/abort_request")).collect();
    assert!(told.contains(&abort.span_id), "{told:?}");
}

/// The prefill leg fails while the decode leg waits: the decode pod is told twice, since the first call can overtake.
#[tokio::test(flavor = "multi_thread")]
async fn r88_a_failed_prefill_leg_aborts_the_other_one() {
    for protocol in PROTOCOLS {
        let collector = Collector::start().await;
        let fleet = exporting(&collector, protocol, &[("AIBRIX_DECODE_ABORT_RETRY_DELAY", "0.1")]);
        let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::of(EngineConfig::sglang) }).await;
        let path = sandbox.paths().remove(0);
        let hold = sandbox.prefill[0].hold();
        sandbox.prefill[0].script(Fault::on("/v1/").answer(500, "text/plain", "no").close_connection());
        let asked = tokio::spawn(call(&path, &trace(4), false).send());
        within("both legs", async {
            hold.wait_for(1).await;
            sandbox.decode[0].wait_until(|decode| decode.stats().transferring == 1).await;
        })
        .await;
        hold.release();
        assert_eq!(within("the answer", asked).await.expect("no panic").status, 500);
        let children = [HEAD, BODY, SELECT, PREFILL, DECODE, INFERENCE, ABORT, ABORT];
        let spans = gathered(&collector, &trace(4), PARENT, &children).await;
        let (aborts, decode) = (all(&spans, ABORT), one(&spans, DECODE));
        for abort in &aborts {
            assert_abort(&sandbox, abort, decode, "http_status");
        }
        assert!(!aborts[0].attributes.contains_key("http.request.resend_count"));
        assert_attributes(aborts[1], &[("http.request.resend_count", "1")]);
        assert!(aborts[1].start > one(&spans, "tandem.request").end, "it outlives the request");
        assert_attributes(one(&spans, PREFILL), &[("error.type", "http_status"), ("http.response.status_code", "500")]);
        sandbox.close().await;
    }
}

/// The client leaves in the middle of an answer. (vLLM's pods hear of it by the closed connection: see `trees`.)
#[tokio::test(flavor = "multi_thread")]
async fn r88_a_client_that_leaves_is_told_on() {
    for protocol in PROTOCOLS {
        let collector = Collector::start().await;
        let fleet = exporting(&collector, protocol, &[]);
        let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::of(EngineConfig::sglang) }).await;
        let path = sandbox.paths().remove(0);
        sandbox.decode[0].script(Fault::on("/v1/").stall_after(2));
        let mut events = call(&path, &trace(5), true).send().await.events();
        events.next().await.expect("an event");
        events.abandon();
        let spans = gathered(&collector, &trace(5), PARENT, &[&STREAMED[..], &[PREFILL, DECODE, ABORT]].concat()).await;
        let root = one(&spans, "tandem.request");
        assert!(root.events.contains(&"client_gone".to_owned()), "{root:?}");
        assert_attributes(root, &[("http.response.status_code", "499"), ("error.type", "client_cancelled_eof")]);
        assert_abort(&sandbox, one(&spans, ABORT), one(&spans, DECODE), "client_gone");
        sandbox.close().await;
    }
}

/// A client that leaves between the legs: the decode engine hears of the request all the same, under a span of its own.
#[tokio::test(flavor = "multi_thread")]
async fn r88_an_engine_that_nobody_waits_for_is_told_its_span() {
    let collector = Collector::start().await;
    let fleet = exporting(&collector, Protocol::Grpc, &[]);
    let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
    let path = sandbox.paths().remove(0);
    // The moment between the legs is short: the client leaves together with the answer of the prefill pod.
    let mut met = false;
    for number in 100..400 {
        sandbox.clear();
        let hold = sandbox.prefill[0].hold();
        let leaving = tokio::spawn(call(&path, &trace(number), true).try_send());
        within("the leg", hold.wait_for(1)).await;
        leaving.abort();
        hold.release();
        let root = collector
            .wait_for("the root", |spans| {
                let root = |span: &&Span| span.trace_id == trace(number) && span.name == "tandem.request";
                spans.iter().find(root).cloned()
            })
            .await;
        assert!(root.events.contains(&"client_gone".to_owned()), "{root:?}");
        within("quiet", sandbox.prefill[0].wait_until(|engine| engine.stats().live_requests == 0)).await;
        // Too early: the leg was cut. Too late: the request went on as usual.
        let relayed = root.attributes.get("handoff").is_some_and(|handoff| handoff == "relayed");
        if !relayed || root.events.contains(&"hand_over".to_owned()) {
            continue;
        }
        let children = [HEAD, BODY, SELECT, PREFILL, DECODE];
        let spans = gathered(&collector, &trace(number), PARENT, &children).await;
        let decode = one(&spans, DECODE);
        assert_attributes(decode, &[("tandem.nobody_waits", "true")]);
        assert_eq!(parents(&sandbox.decode[0], "/v1/"), std::slice::from_ref(&decode.span_id));
        met = true;
        break;
    }
    assert!(met, "the client never left between the legs");
    tokio::time::timeout(Duration::from_secs(20), async {
        sandbox.decode[0].wait_until(|engine| engine.stats().live_requests == 0).await;
    })
    .await
    .expect("nobody works for nobody");
    sandbox.close().await;
}
