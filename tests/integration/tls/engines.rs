//! Engines behind TLS: both legs, metrics, and Envoy with the sections of its file that are for them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;

use super::{CHAT, foreign};
use crate::harness::engines::{MODEL, pd_by_default, start_engine};
use crate::harness::envoy::SHIPPED_FILE;
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::{Answer, Call, base};
use crate::harness::oracle::oracle;
use crate::harness::pods::PodManifest;
use crate::harness::{SOON, Task, eventually};

/// What the certificates of engines are called in the shipped file.
const NAME: &str = "engines.internal";

/// The certificates of all tests here: a change to Envoy's file is a function without memory.
static SHARED: OnceLock<Option<crate::harness::tls::Authority>> = OnceLock::new();

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("engine-tls")
}

fn shared() -> Option<&'static crate::harness::tls::Authority> {
    let make = || Some(crate::harness::tls::Authority::new(&directory())?.issue("engine", NAME));
    SHARED.get_or_init(make).as_ref()
}

/// Uncomments the sections for engines over TLS: their route comes first, their cluster last.
fn with_engine_tls(config: &mut Value) {
    let text = std::fs::read_to_string(SHIPPED_FILE).expect("read the shipped file").replace("#engine-tls# ", "");
    let ca = shared().expect("made before").ca().display().to_string();
    assert!(text.contains("/etc/envoy/tls/engine-ca.crt"));
    let text = text.replace("/etc/envoy/tls/engine-ca.crt", &ca);
    let whole: Value = serde_saphyr::from_str(&text).expect("parse the YAML");
    let clusters = |config: &Value| config["static_resources"]["clusters"].as_array().cloned().expect("clusters");
    let tls = clusters(&whole).into_iter().find(|cluster| cluster["name"] == "original_destination_tls_cluster");
    config["static_resources"]["clusters"].as_array_mut().expect("clusters").push(tls.expect("the cluster"));
    let filter = |config: &Value| config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0].clone();
    let routes = &filter(&whole)["typed_config"]["route_config"]["virtual_hosts"][0]["routes"];
    let route = routes.as_array().expect("routes")[0].clone();
    assert_eq!(route["name"], "routed_tls");
    let manager = &mut config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"];
    let all = manager["route_config"]["virtual_hosts"][0]["routes"].as_array_mut().expect("routes");
    all.insert(0, route);
}

/// TLS before an engine.
struct Behind {
    address: SocketAddr,
    _task: Task,
}

async fn behind(engine: &Engine, config: Arc<ServerConfig>) -> Behind {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let (address, engine) = (listener.local_addr().expect("address"), Engine::address(engine));
    let acceptor = TlsAcceptor::from(config);
    let task = Task::spawn(async move {
        let mut running = tokio::task::JoinSet::new();
        while let Ok((client, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            running.spawn(async move {
                // Who does not believe the certificate, or speaks in the clear, goes no further.
                let Ok(mut client) = acceptor.accept(client).await else { return };
                let Ok(mut server) = TcpStream::connect(engine).await else { return };
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    Behind { address, _task: task }
}

fn over_tls(name: &str, at: &Behind) -> PodManifest {
    PodManifest::new(name, MODEL, at.address).annotation("model.aibrix.ai/scheme", "https")
}

async fn ask(path: &str, strategy: &str, stream: bool) -> Answer {
    let body =
        json!({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": stream});
    Call::post(path, CHAT, body.to_string()).header("routing-strategy", strategy).send().await
}

fn environment(ca: Option<PathBuf>, name: &str, skip: bool) -> Vec<(String, String)> {
    let ca = ca.map(|ca| ("TANDEM_ENGINE_TLS_CA".to_owned(), ca.display().to_string()));
    let name = Some(name).filter(|name| !name.is_empty());
    let name = name.map(|name| ("TANDEM_ENGINE_TLS_SERVER_NAME".to_owned(), name.to_owned()));
    let skip = ("TANDEM_ENGINE_TLS_INSECURE_SKIP_VERIFY".to_owned(), skip.to_string());
    ca.into_iter().chain(name).chain([skip]).collect()
}

async fn scraped(fleet: &Fleet, pods: usize) {
    for tandem in &fleet.tandems {
        eventually(SOON, "the engines' metrics", async || {
            let page = tandem.admin_json("/debug/fleet").await;
            let all = page["models"][MODEL]["pods"].as_array().cloned().unwrap_or_default();
            (all.iter().filter(|pod| pod["signals"]["fresh"] == true).count() == pods).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_are_dialled_over_tls_in_every_way() {
    let Some(authority) = shared() else { return };
    let (prefill, decode) =
        (start_engine(EngineConfig::prefill(MODEL)).await, start_engine(EngineConfig::decode(MODEL)).await);
    let plain = start_engine(EngineConfig::combined(MODEL)).await;
    let server = authority.open_server("engine");
    let (p, d) = (behind(&prefill, Arc::clone(&server)).await, behind(&decode, server).await);
    let config = pd_by_default();
    let pods = [
        over_tls("p0", &p).role("rs", "prefill").config(&config),
        over_tls("d0", &d).role("rs", "decode").config(&config),
        PodManifest::new("c0", MODEL, Engine::address(&plain)).label("scheme", "plain").config(&config),
    ];
    let env = environment(Some(authority.ca()), NAME, false);
    let options = FleetOptions { env, edit_envoy: Some(with_engine_tls), ..FleetOptions::default() };
    let fleet = Fleet::start(pods, options).await;
    scraped(&fleet, 3).await;
    for path in fleet.paths() {
        for stream in [false, true] {
            [&prefill, &decode].into_iter().for_each(Engine::clear_records);
            let answer = ask(&path, "pd", stream).await;
            assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "d0"));
            assert_eq!(answer.header("target-pod-ip"), d.address.to_string());
            assert!(answer.body().await.complete);
            // Both legs, with a hand-off that the decode engine could use.
            for engine in [&prefill, &decode] {
                let records = engine.records_for(CHAT);
                assert_eq!(records.len(), 1, "{records:?}");
                assert_eq!(records[0].header("target-pod-scheme").is_some(), records[0].header("target-pod").is_some());
            }
        }
        // A pod in the clear beside them, and a client that asks for another scheme than the pod's.
        let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2});
        let call = Call::post(&path, CHAT, body.to_string()).header("routing-strategy", "random");
        let answer = call.header("external-filter", "scheme=plain").header("target-pod-scheme", "https").send().await;
        assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "c0"));
        assert!(answer.body().await.complete);
    }
    oracle(&fleet.tandems, &[&prefill, &decode, &plain]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_is_not_believed_is_not_used() {
    let Some(authority) = shared() else { return };
    let engine = start_engine(EngineConfig::combined(MODEL)).await;
    let own = behind(&engine, authority.open_server("engine")).await;
    let stranger = behind(&engine, foreign(&directory()).open_server("stranger")).await;
    for (at, name, skip, status) in [
        (&own, NAME, false, 200),
        // The certificate holds the address too.
        (&own, "", false, 200),
        (&own, "somebody.else", false, 503),
        (&stranger, "", false, 503),
        (&stranger, "", true, 200),
    ] {
        engine.clear_records();
        let env = environment(Some(authority.ca()), name, skip);
        let options = FleetOptions { replicas: 1, envoy: false, env, ..FleetOptions::default() };
        let fleet = Fleet::start([over_tls("c0", at)], options).await;
        let answer = ask(&base(fleet.tandems[0].front().expect("a front")), "random", false).await;
        assert_eq!(answer.status, status, "{name:?} {skip}");
        answer.body().await;
        assert_eq!(engine.records_for(CHAT).len(), usize::from(status == 200));
        oracle(&fleet.tandems, &[&engine]).await;
    }
}
