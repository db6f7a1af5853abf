//! R88 with the real Envoy, its tracing section switched on: one trace from the client to both engines.

use std::collections::BTreeMap;

use serde_json::Value;
use tandem_sim::EngineConfig;

use super::{CHAT, PARENT, Protocol, SERVICE, TRACE, chat, exporting, received, traceparent, tree};
use crate::harness::engines::{Sandbox, SandboxOptions, only};
use crate::harness::envoy::{Envoy, EnvoyOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::Call;
use crate::harness::otlp::{Collector, Span};

/// Every trace is recorded, not one in a hundred.
fn record_all(config: &mut Value) {
    let manager = &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    let sampler = &mut manager["tracing"]["provider"]["typed_config"]["sampler"]["typed_config"];
    let share = &mut sampler["wrapped_sampler"]["typed_config"]["sampling_percentage"]["numerator"];
    assert!(share.is_number(), "{manager}");
    *share = 100.into();
}

/// The spans from `span` up to the first whose parent is not among them.
fn ancestors<'a>(spans: &'a BTreeMap<String, Span>, span: &str) -> Vec<&'a Span> {
    let mut chain = Vec::new();
    let mut next = spans.get(span);
    while let Some(span) = next {
        chain.push(span);
        next = spans.get(&span.parent_id);
    }
    chain
}

#[tokio::test(flavor = "multi_thread")]
async fn r88_one_trace_across_envoy_and_both_engines() {
    let engines: [fn(EngineConfig) -> EngineConfig; 3] = [|config| config, EngineConfig::sglang, EngineConfig::trtllm];
    for engine in engines {
        one_trace(engine).await;
    }
}

async fn one_trace(engine: fn(EngineConfig) -> EngineConfig) {
    let collector = Collector::start().await;
    let fleet = FleetOptions { front: false, ..exporting(&collector, Protocol::Grpc, &[]) };
    let mut sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::of(engine) }).await;
    let tandem = &sandbox.fleet.tandems[0];
    let options = EnvoyOptions {
        failover: None,
        tandem_grpc: vec![tandem.grpc()],
        tandem_http: tandem.http(),
        healthy: None,
        otel: Some(collector.grpc()),
        edit: Some(record_all),
    };
    sandbox.fleet.envoy = Some(Envoy::start_with(options).await);
    let path = sandbox.paths().remove(0);
    for client in [Some(traceparent(TRACE, PARENT)), None] {
        sandbox.clear();
        let call =
            client.iter().fold(Call::post(&path, CHAT, chat(true)), |call, value| call.header("traceparent", value));
        let answer = call.send().await;
        assert_eq!(answer.status, 200);
        let trace = answer.header("request-id").to_owned();
        assert!(answer.body().await.complete);
        assert!(client.is_none() || trace == TRACE, "{trace}");
        // A leg beside the other one may outlive the request.
        let is_prefill = |span: &Span| span.trace_id == trace && span.name == "tandem.prefill";
        collector.wait_for("the prefill leg", |spans| spans.iter().any(is_prefill).then_some(())).await;
        let ours = tree(&collector, &trace).await;
        let (prefill, decode) = (received(&only(&sandbox.prefill[0])), received(&only(&sandbox.decode[0])));
        assert_eq!((&prefill.0, &decode.0), (&trace, &trace), "one trace over all legs");
        assert_eq!(prefill.1, ours["tandem.prefill"].span_id);
        // Envoy sends its spans when it likes: wait for those that the links lead to.
        let of_trace = |spans: &[Span]| -> BTreeMap<String, Span> {
            let ours = spans.iter().filter(|span| span.trace_id == trace);
            ours.map(|span| (span.span_id.clone(), span.clone())).collect()
        };
        let wanted = [ours["tandem.request"].parent_id.clone(), decode.1.clone()];
        let rpc = &ours["tandem.request"].attributes;
        assert_eq!(rpc["rpc.system.name"], "grpc");
        assert_eq!(rpc["rpc.method"], "envoy.service.ext_proc.v3.ExternalProcessor/Process");
        let root_of = client.as_ref().map_or("", |_| PARENT);
        let spans = collector
            .wait_for("Envoy's spans", |spans| {
                let spans = of_trace(spans);
                let complete =
                    |span: &String| ancestors(&spans, span).last().is_some_and(|top| top.parent_id == root_of);
                wanted.iter().all(complete).then_some(spans)
            })
            .await;
        // The trace of docs/tracing.md, for who runs this with --nocapture.
        println!("{}", super::rendered(&spans.values().cloned().collect::<Vec<_>>()));
        let names = |span: &str| -> Vec<String> {
            ancestors(&spans, span).iter().map(|span| format!("{}: {}", span.service, span.name)).collect()
        };
        let ingress = "tandem-envoy: ingress";
        assert_eq!(
            names(&ours["tandem.request"].span_id),
            [
                &format!("{SERVICE}: tandem.request"),
                "tandem-envoy: async envoy.service.ext_proc.v3.ExternalProcessor.Process egress",
                ingress,
            ]
        );
        // Envoy carries the decode leg, so the engine hangs under Envoy's own span of it.
        assert_eq!(names(&decode.1), ["tandem-envoy: router original_destination_cluster egress", ingress]);
    }
    sandbox.close().await;
}
