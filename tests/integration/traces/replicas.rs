//! What replicas tell one another, in traces: claims under the request, syncs linked to it.

use serde_json::json;
use tandem_sim::Fault;

use super::{
    CHAT, CLAIM, CLIENT, DECODE, PARENT, PREFILL, Protocol, SERVICE, STREAMED, assert_attributes, chat, exporting,
    gathered, one, traceparent,
};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::{Call, base};
use crate::harness::otlp::{Collector, Span};
use crate::harness::pods::PodManifest;
use crate::harness::redis::Redis;
use crate::harness::{SOON, eventually, within};

const SYNC: &str = "tandem.state_sync";

/// Two replicas that have met in Redis.
async fn two(collector: &Collector, redis: &Redis, protocol: Protocol, env: &[(&str, &str)]) -> Sandbox {
    let url = redis.url();
    let env = [&[("REDIS_URL", url.as_str())], env].concat();
    let mut fleet = exporting(collector, protocol, &env);
    fleet.replicas = 2;
    let pod = |pod: PodManifest| {
        let limited = json!({"routingStrategy": "pd", "requestsPerSecond": 1000});
        pod.config(&json!({"profiles": {"default": {"routingStrategy": "pd"}, "limited": limited}}))
    };
    let sandbox = Sandbox::start(SandboxOptions { pod, fleet, ..SandboxOptions::default() }).await;
    for tandem in &sandbox.fleet.tandems {
        eventually(SOON, "the replicas to meet", async || {
            let page = tandem.admin_json("/debug/state").await;
            let model = page["models"].as_object().and_then(|models| models.values().next()).cloned();
            (model.unwrap_or_default()["members"].as_u64() == Some(2)).then_some(())
        })
        .await;
    }
    sandbox
}

fn fronts(sandbox: &Sandbox) -> Vec<String> {
    sandbox.fleet.tandems.iter().map(|tandem| base(tandem.front().expect("a front"))).collect()
}

/// The first sync that is linked to a span of this trace.
async fn sync_of(collector: &Collector, trace: &str) -> Span {
    collector
        .wait_for("a sync that carries the request", |spans| {
            let linked = |span: &&Span| span.name == SYNC && span.links.iter().any(|(linked, _)| linked == trace);
            spans.iter().find(linked).cloned()
        })
        .await
}

#[tokio::test(flavor = "multi_thread")]
async fn r88_a_sync_is_linked_to_the_requests_that_it_carries() {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let (collector, redis) = (Collector::start().await, Redis::start().await);
        // Syncs have no parent: a sampler that records only what callers record must not lose them.
        let sandbox = two(&collector, &redis, protocol, &[("OTEL_TRACES_SAMPLER", "parentbased_always_off")]).await;
        for (index, front) in fronts(&sandbox).into_iter().enumerate() {
            let trace = format!("{:032x}", index + 1);
            // The charge stays for as long as the answer takes, so that a sync surely sees it.
            let hold = sandbox.decode[0].hold();
            let call = Call::post(&front, CHAT, chat(true)).header("traceparent", &traceparent(&trace, PARENT));
            let asked = tokio::spawn(async move { call.send().await.body().await.complete });
            within("the decode leg", hold.wait_for(1)).await;
            // Another one, which its caller does not record.
            let quiet = format!("00-{:032x}-{PARENT}-00", index + 100);
            let quiet = Call::post(&front, CHAT, chat(false)).header("traceparent", &quiet);
            let unheard = tokio::spawn(async move { quiet.send().await.body().await.complete });
            within("the other leg", hold.wait_for(2)).await;
            let sync = sync_of(&collector, &trace).await;
            hold.release();
            assert!(asked.await.expect("no panic") && unheard.await.expect("no panic"));
            let children = [&STREAMED[..], &[PREFILL, DECODE]].concat();
            let spans = gathered(&collector, &trace, PARENT, &children).await;
            let root = one(&spans, "tandem.request");
            assert!(sync.links.contains(&(trace.clone(), root.span_id.clone())), "{sync:?}");
            assert_eq!((sync.parent_id.as_str(), sync.kind, sync.service.as_str()), ("", CLIENT, SERVICE));
            assert_ne!(sync.trace_id, trace, "a trace of its own");
            assert_attributes(
                &sync,
                &[
                    ("db.system.name", "redis"),
                    ("db.operation.name", "EVALSHA"),
                    ("db.stored_procedure.name", "ledger_sync"),
                    ("model", "m"),
                    ("tandem.sync.result", "done"),
                    ("tandem.sync.links_lost", "0"),
                ],
            );
            for name in ["tandem.sync.shares", "tandem.sync.sent_bytes"] {
                assert!(sync.attributes[name].parse::<u64>().expect("a number") > 0, "{name} of {sync:?}");
            }
            assert_eq!(sync.resource["service.instance.id"], format!("gateway-{index}"), "who made the charge");
            assert!(sync.start >= root.start && sync.start <= root.end, "it ran while the request did");
        }
        // Nothing of requests that nobody records, and no sync without a link.
        let spans = collector.spans();
        assert!(spans.iter().all(|span| span.name != SYNC || (1..=16).contains(&span.links.len())));
        let quiet = |trace: &str| (100..102).any(|index| trace == format!("{index:032x}"));
        assert!(spans.iter().all(|span| !quiet(&span.trace_id) && span.links.iter().all(|(trace, _)| !quiet(trace))));
        sandbox.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r88_claims_and_limits_are_steps_of_the_request() {
    for protocol in [Protocol::Grpc, Protocol::Http] {
        let (collector, redis) = (Collector::start().await, Redis::start().await);
        // On a busy machine a claim may be late: that is another test's matter.
        let env = [("TANDEM_STATE_PLANE_GRADE", "claim"), ("TANDEM_RATE_LIMIT_WAIT_MS", "20000")];
        let sandbox = two(&collector, &redis, protocol, &env).await;
        let front = fronts(&sandbox).remove(0);
        let trace = format!("{:032x}", 7);
        let call = Call::post(&front, CHAT, chat(true)).header("traceparent", &traceparent(&trace, PARENT));
        let answer = call.header("config-profile", "limited").send().await;
        assert_eq!(answer.status, 200);
        assert!(answer.body().await.complete);
        let children = [&STREAMED[..], &[PREFILL, DECODE, CLAIM, "tandem.limits"]].concat();
        let spans = gathered(&collector, &trace, PARENT, &children).await;
        let (claim, limits) = (one(&spans, CLAIM), one(&spans, "tandem.limits"));
        assert_attributes(claim, &[("db.system.name", "redis"), ("db.stored_procedure.name", "claim")]);
        let outcome = claim.attributes["tandem.claim.outcome"].as_str();
        assert!(["granted", "unsure"].contains(&outcome), "{outcome}");
        assert_attributes(limits, &[("db.operation.name", "EVALSHA"), ("db.stored_procedure.name", "rate")]);
        assert!(limits.end <= claim.start && claim.end <= one(&spans, PREFILL).start);
        sandbox.close().await;
    }
}

/// The client leaves before its pods were told anything: the sync that carries the charge says so all the same.
#[tokio::test(flavor = "multi_thread")]
async fn r88_a_request_that_fails_is_linked_too() {
    let (collector, redis) = (Collector::start().await, Redis::start().await);
    let sandbox = two(&collector, &redis, Protocol::Grpc, &[]).await;
    let front = fronts(&sandbox).remove(0);
    let hold = sandbox.prefill[0].hold();
    sandbox.prefill[0].script(Fault::on("/v1/").answer(500, "text/plain", "no"));
    let asked = tokio::spawn(
        Call::post(&front, CHAT, chat(true)).header("traceparent", &traceparent(&"a".repeat(32), PARENT)).send(),
    );
    within("the leg", hold.wait_for(1)).await;
    let linked = |spans: &[Span]| spans.iter().any(|span| span.name == SYNC && !span.links.is_empty()).then_some(());
    collector.wait_for("the sync, while the request runs", linked).await;
    hold.release();
    assert_eq!(asked.await.expect("no panic").status, 503);
    sandbox.close().await;
}
