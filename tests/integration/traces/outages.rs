//! A collector that does not answer, or is not there, costs spans and nothing else.

use super::{CHAT, Protocol, chat, exporting};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::http::Call;
use crate::harness::otlp::Collector;
use crate::harness::processor::closed_port;
use crate::harness::raw::{RawServer, Step};
use crate::harness::{SOON, eventually};

/// Spans of one whole answer without a stream: the root, both legs, five steps.
const SPANS: f64 = 8.0;
const QUEUE: f64 = 64.0;
const BATCH: f64 = 16.0;
const DROPPED: &str = "tandem_spans_dropped_total";
const MEMORY: &str = "process_resident_memory_bytes";

#[tokio::test(flavor = "multi_thread")]
async fn export_never_holds_a_request_up() {
    let hanging = RawServer::start(vec![vec![Step::AwaitClose]]).await;
    for (protocol, name) in [(Protocol::Grpc, "grpc"), (Protocol::Http, "http/protobuf")] {
        for (kind, address) in [("silent", hanging.address()), ("absent", closed_port())] {
            let endpoint = format!("http://{address}");
            let env = [
                ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
                ("OTEL_EXPORTER_OTLP_PROTOCOL", name),
                ("OTEL_EXPORTER_OTLP_TIMEOUT", "300"),
                ("OTEL_BSP_MAX_QUEUE_SIZE", "64"),
                ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16"),
            ];
            let collector = Collector::start().await;
            let mut fleet = exporting(&collector, protocol, &[]);
            fleet.env.retain(|(name, _)| !name.starts_with("OTEL_EXPORTER"));
            fleet.env.extend(env.map(|(name, value)| (name.to_owned(), value.to_owned())));
            let sandbox = Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await;
            let (path, tandem) = (sandbox.paths().remove(0), &sandbox.fleet.tandems[0]);
            let serve = async |count: u32| {
                for _ in 0..count {
                    let answer = Call::post(&path, CHAT, chat(false)).send().await;
                    assert_eq!(answer.status, 200, "{kind} {name}");
                    assert!(answer.body().await.complete);
                }
            };
            serve(60).await;
            let before = tandem.metrics().await.sum(MEMORY, &[]);
            serve(240).await;
            // All but what still waits, or is being sent, is counted.
            let made = 300.0 * SPANS;
            let metrics = eventually(SOON, "the dropped spans", async || {
                let metrics = tandem.metrics().await;
                (metrics.sum(DROPPED, &[]) >= made - QUEUE - BATCH).then_some(metrics)
            })
            .await;
            assert!(metrics.sum(DROPPED, &[]) <= made, "{kind} {name}: {}", metrics.sum(DROPPED, &[]));
            let grown = metrics.sum(MEMORY, &[]) - before;
            assert!(before > 0.0 && grown < f64::from(8 << 20), "{kind} {name}: {grown} bytes more");
            assert!(collector.spans().is_empty());
            sandbox.close().await;
        }
    }
}
