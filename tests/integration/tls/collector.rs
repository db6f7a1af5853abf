//! Spans over TLS, both ways of OTLP.

use super::{authority, chat, complete, foreign};
use crate::harness::engines::{Sandbox, SandboxOptions};
use crate::harness::fleet::FleetOptions;
use crate::harness::http::base;
use crate::harness::otlp::Collector;
use crate::harness::tandem::{Tandem, TandemOptions};
use crate::harness::{SOON, eventually};

const DROPPED: &str = "tandem_spans_dropped_total";

async fn exporting(env: Vec<(String, String)>) -> Sandbox {
    let fleet = FleetOptions { replicas: 1, envoy: false, env, ..FleetOptions::default() };
    Sandbox::start(SandboxOptions { fleet, ..SandboxOptions::default() }).await
}

#[tokio::test(flavor = "multi_thread")]
async fn spans_travel_over_tls() {
    let Some((directory, authority)) = authority() else { return };
    let stranger = foreign(directory.path());
    let collector = Collector::secure(&authority, "tandem").await;
    let https = |address: std::net::SocketAddr| format!("https://localhost:{}", address.port());
    let file = |path: std::path::PathBuf| path.display().to_string();
    for (protocol, endpoint) in [("grpc", https(collector.grpc())), ("http/protobuf", https(collector.http()))] {
        let common = [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.clone()),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", protocol.to_owned()),
            ("OTEL_BSP_SCHEDULE_DELAY", "20".to_owned()),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "2000".to_owned()),
        ];
        let own = [
            ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", file(authority.cert("client"))),
            ("OTEL_EXPORTER_OTLP_CLIENT_KEY", file(authority.key("client"))),
        ];
        let believed = ("OTEL_EXPORTER_OTLP_CERTIFICATE", file(authority.ca()));
        let not_believed = ("OTEL_EXPORTER_OTLP_CERTIFICATE", file(stranger.ca()));
        let whatever = ("OTEL_EXPORTER_OTLP_INSECURE_SKIP_VERIFY", "true".to_owned());
        let system = ("SSL_CERT_FILE", file(authority.ca()));
        for (case, variables, arrives) in [
            ("an authority of its own", [&own[..], std::slice::from_ref(&believed)].concat(), true),
            ("the machine's authorities", [&own[..], &[system]].concat(), true),
            ("another authority", [&own[..], std::slice::from_ref(&not_believed)].concat(), false),
            ("another authority, unchecked", [&own[..], &[not_believed, whatever]].concat(), true),
            ("no client certificate", vec![believed], false),
        ] {
            let env = common.iter().cloned().chain(variables).map(|(name, value)| (name.to_owned(), value)).collect();
            let sandbox = exporting(env).await;
            let before = collector.spans().len();
            let tandem = &sandbox.fleet.tandems[0];
            assert_eq!(complete(chat(&base(tandem.front().expect("a front")), 2)).await, Ok(()), "{protocol}: {case}");
            if arrives {
                let what = format!("spans over {protocol}: {case}");
                collector
                    .wait_for(&what, |spans| {
                        spans[before..].iter().any(|span| span.name == "tandem.request").then_some(())
                    })
                    .await;
            } else {
                let what = format!("dropped spans over {protocol}: {case}");
                eventually(SOON, &what, async || (tandem.metrics().await.sum(DROPPED, &[]) > 0.0).then_some(())).await;
                assert_eq!(collector.spans().len(), before, "{protocol}: {case}");
            }
            sandbox.close().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_for_the_collector_that_cannot_be_used_refuse_the_start() {
    let env =
        [("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c:4317"), ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/nowhere/ca.pem")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()));
    let pods = crate::harness::pods::PodsFile::file([]);
    let options = TandemOptions { pods: pods.path(), env: env.to_vec(), ..TandemOptions::default() };
    let failure = Tandem::try_start(options).await.expect_err("no start");
    assert!(failure.contains("TLS towards the OTLP collector: /nowhere/ca.pem cannot be read"), "{failure}");
}
