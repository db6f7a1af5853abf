//! Strategies, profiles, and where they come from.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::json;
use tandem_sim::{Engine, EngineConfig, Fault, Hold};
use tokio::task::JoinSet;

use super::{Pair, ask, chat, fleet_shows, settle, settle_pairs};
use crate::harness::engines::{MODEL, start_engine};
use crate::harness::ext_proc::{ExtProcClient, Head, Reply};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::{Answer, base};
use crate::harness::pods::PodManifest;
use crate::harness::tandem::{Tandem, TandemOptions};
use crate::harness::within;

/// `prefillRequestTimeout` bounds the prefill of its own profile's requests only.
#[tokio::test(flavor = "multi_thread")]
async fn r32_the_prefill_timeout_is_the_profiles() {
    let pairs = [Pair::start(0, MODEL, |config| config).await];
    let config = json!({"defaultProfile": "patient", "profiles": {
        "patient": {"routingStrategy": "pd"},
        "hasty": {"routingStrategy": "pd", "routingConfig": {"prefillRequestTimeout": 2}},
    }});
    let options = FleetOptions { replicas: 1, ..FleetOptions::default() };
    let fleet = Fleet::start(pairs[0].pods(&config), options).await;
    // Everybody's prefill takes as long; each of them is sent over both ways at once.
    for (prefill, cases) in [(1_200, vec![("hasty", 200)]), (3_000, vec![("hasty", 503), ("patient", 200), ("", 200)])]
    {
        pairs[0].prefill.script(Fault::on("/v1/").head_delay(Duration::from_millis(prefill)).always());
        let mut requests = JoinSet::new();
        for (profile, status) in cases {
            for path in fleet.paths() {
                let mut call = ask(&path, chat(MODEL, &format!("{prefill} {profile}"), 2, false));
                if !profile.is_empty() {
                    call = call.header("config-profile", profile);
                }
                requests.spawn(async move { (profile, status, call.send().await) });
            }
        }
        for (profile, status, answer) in requests.join_all().await {
            assert_eq!(answer.status, status, "{profile}, prefill of {prefill} ms");
            let failed = status == 503;
            assert_eq!(answer.header("x-error-pd-prefill") == "true", failed);
            let body = answer.json().await;
            assert_eq!(body["error"].is_object(), failed, "{body}");
        }
        pairs[0].prefill.clear_faults();
    }
    let metrics = fleet.tandems[0].metrics().await;
    for (name, labels) in [
        ("gateway_pd_prefill_failure_total", [("class", "timeout"), ("stage", "before_response")]),
        ("gateway_prefill_request_fail_total", [("status", "deadline_exceeded"), ("status_code", "504")]),
        ("gateway_request_model_fail_total", [("status", "pd_prefill_failure"), ("status_code", "503")]),
    ] {
        let all: Vec<_> = metrics.matching(name, &[]).collect();
        assert_eq!(metrics.sum(name, &labels), 2.0, "{name}: {all:?}");
    }
    settle_pairs(&fleet, &pairs).await;
}

fn pods_without_roles(engines: &[Engine], model: &str, config: &serde_json::Value) -> Vec<PodManifest> {
    let pod = |(number, engine): (usize, &Engine)| {
        PodManifest::new(&format!("{model}{number}"), model, Engine::address(engine)).config(config)
    };
    engines.iter().enumerate().map(pod).collect()
}

async fn combined_engines(model: &str, count: usize) -> Vec<Engine> {
    let mut engines = Vec::new();
    for _ in 0..count {
        engines.push(start_engine(EngineConfig::combined(model)).await);
    }
    engines
}

#[tokio::test(flavor = "multi_thread")]
async fn strategies_are_chosen_by_header_profile_or_lock() {
    let free = combined_engines("free", 3).await;
    let locked = combined_engines("locked", 2).await;
    let by_profile = json!({"profiles": {"default": {"routingStrategy": "least-request"},
        "dice": {"routingStrategy": "random"}}});
    let lock = json!({"lockedRoutingStrategy": "least-request",
        "profiles": {"default": {"routingStrategy": "random"}}});
    let pods = [pods_without_roles(&free, "free", &by_profile), pods_without_roles(&locked, "locked", &lock)];
    let options = FleetOptions { replicas: 1, ..FleetOptions::default() };
    let fleet = Fleet::start(pods.concat(), options).await;
    for path in fleet.paths() {
        // Who decides: the lock, else the header, else the profile.
        for (model, header, profile, expected) in [
            ("free", "", "", "least-request"),
            ("free", "", "dice", "random"),
            ("free", "least-request", "dice", "least-request"),
            ("free", "random", "", "random"),
            ("locked", "random", "", "least-request"),
            ("locked", "", "", "least-request"),
        ] {
            let answer = with_headers(&path, model, header, profile).await;
            assert_eq!(answer.status, 200, "{model} {header} {profile}");
            assert_eq!(answer.header("routing-strategy"), expected, "{model} {header} {profile}");
            assert!(answer.header("target-pod").starts_with(model));
            assert!(answer.body().await.complete);
        }
        let answer = with_headers(&path, "free", "round-robin-of-doom", "").await;
        assert_eq!((answer.status.as_u16(), answer.header("x-error-invalid-routing-strategy")), (400, "true"));
        assert_eq!(with_headers(&path, "locked", "round-robin-of-doom", "").await.status, 200, "the lock wins");

        // Least request: nine that stay are three for each.
        let holds: Vec<Hold> = free.iter().map(Engine::hold).collect();
        let mut requests = JoinSet::new();
        for _ in 0..9 {
            requests.spawn(ask(&path, chat("free", "stays", 2, true)).send());
        }
        for hold in &holds {
            within("three requests", hold.wait_for(3)).await;
        }
        assert_eq!(holds.iter().map(Hold::waiting).sum::<usize>(), 9);
        holds.into_iter().for_each(Hold::release);
        for answer in requests.join_all().await {
            assert!(answer.body().await.complete);
        }
        // Random: with 40 requests, that one of three pods gets none happens once in four million times.
        let mut targets = BTreeSet::new();
        for _ in 0..40 {
            let answer = with_headers(&path, "free", "random", "").await;
            targets.insert(answer.header("target-pod").to_owned());
            assert!(answer.body().await.complete);
        }
        assert_eq!(targets.len(), 3, "{targets:?}");
    }
    settle(&fleet.tandems, &free.iter().chain(&locked).collect::<Vec<_>>()).await;
}

async fn with_headers(path: &str, model: &str, strategy: &str, profile: &str) -> Answer {
    let mut call = ask(path, chat(model, "hello", 2, false));
    for (name, value) in [("routing-strategy", strategy), ("config-profile", profile)] {
        if !value.is_empty() {
            call = call.header(name, value);
        }
    }
    call.send().await
}

/// A request that names no strategy, of a model that has none, is Envoy's own to route: by the header `model`.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_strategy_is_left_to_envoys_routes() {
    let engines = combined_engines(MODEL, 1).await;
    let plain = PodManifest::new("plain", MODEL, Engine::address(&engines[0]));
    let options = FleetOptions { replicas: 1, ..FleetOptions::default() };
    let fleet = Fleet::start([plain], options).await;

    let client = ExtProcClient::connect(fleet.tandems[0].grpc()).await;
    let mut stream = client.open(&[]);
    let head = Head::post("/v1/chat/completions").raw("content-type", b"application/json").raw("model", b"a lie");
    stream.request_headers(head, false).await;
    let accepted = stream.next().await;
    assert!(matches!(&accepted, Reply::RequestHeaders(mutation) if mutation.remove.contains(&"model".to_owned())));
    let body = chat(MODEL, "hello", 2, false);
    stream.request_body(body.as_bytes(), true).await;
    let mutation = stream.next().await.mutation();
    assert_eq!(mutation.header("model").as_deref(), Some(MODEL));
    assert_eq!((mutation.header("target-pod"), mutation.header("routing-strategy")), (None, None));
    assert!(mutation.clear_route_cache, "the route that matches the header is looked for");
    assert!(mutation.body.is_none_or(|sent| sent == body.as_bytes()), "the body is the client's");
    stream.response_headers(Head::status(200), false).await;
    let marked = stream.next().await.mutation();
    assert_eq!(marked.header("x-went-into-req-headers").as_deref(), Some("true"));
    stream.response_body(b"{}", true).await;
    stream.next().await.mutation();
    stream.reset();

    // The shipped Envoy has no such routes, and says so; the front has nothing but its own choice.
    let [envoy, front] = fleet.paths().try_into().expect("two ways in");
    let answer = ask(&envoy, body.clone()).send().await;
    assert_eq!(answer.status, 404);
    assert_eq!(answer.json().await["error"]["message"], "no route for this request");
    let answer = ask(&front, body).send().await;
    assert_eq!((answer.status.as_u16(), answer.header("routing-strategy")), (200, "least-request"));
    assert!(answer.body().await.complete);
    settle(&fleet.tandems, &[&engines[0]]).await;
}

/// The reference gateway's endpoints file: rolesets by `pd`, plain endpoints by other strategies.
#[tokio::test(flavor = "multi_thread")]
async fn standalone_mode_serves_from_an_endpoints_file() {
    let pairs = [Pair::start(0, "org/split", |c| c).await, Pair::start(1, "org/split", |c| c).await];
    let plain = combined_engines("plain", 2).await;
    let list = |engines: &[&Engine]| {
        engines.iter().map(|engine| format!("\"{}\"", Engine::address(engine))).collect::<Vec<_>>().join(", ")
    };
    let file = format!(
        "models:\n- name: org/split\n  engine: vllm\n  rolesets:\n\
         \x20 - {{name: rs0, prefill: [{}], decode: [{}]}}\n  - name: rs1\n    prefill: [{}]\n    decode:\n    - {}\n\
         - name: plain\n  endpoints: [{}]\n",
        list(&[&pairs[0].prefill]),
        list(&[&pairs[0].decode]),
        list(&[&pairs[1].prefill]),
        list(&[&pairs[1].decode]),
        list(&plain.iter().collect::<Vec<_>>()),
    );
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("endpoints.yaml");
    std::fs::write(&path, &file).expect("write");
    let args = ["--standalone", "--endpoints-config", path.to_str().expect("a path")].map(str::to_owned).to_vec();
    let tandems = [Tandem::start(TandemOptions { front: true, args, ..TandemOptions::default() }).await];
    tandems[0].wait_ready().await;
    let front = base(tandems[0].front().expect("a front"));
    let scraped = |page: &serde_json::Value| super::pods_of(page).iter().all(|pod| pod["signals"]["fresh"] == true);
    fleet_shows(&tandems, "pods are scraped on their serving ports", scraped).await;

    // As the front's own default, and by the header.
    for strategy in ["", "pd"] {
        let answer = with_headers(&front, "org/split", strategy, "").await;
        assert_eq!((answer.status.as_u16(), answer.header("routing-strategy")), (200, "pd"));
        assert!(answer.header("target-pod").starts_with("org-split-127-0-0-1-"), "{:?}", answer.headers);
        assert!(answer.body().await.complete);
    }
    // Both rolesets serve; a pair is never made across them.
    let holds: Vec<Hold> = pairs.iter().map(|pair| pair.prefill.hold()).collect();
    let mut requests = JoinSet::new();
    for number in 0..4 {
        requests.spawn(ask(&front, chat("org/split", &format!("{number}"), 2, true)).send());
    }
    for hold in &holds {
        within("two requests", hold.wait_for(2)).await;
    }
    holds.into_iter().for_each(Hold::release);
    for answer in requests.join_all().await {
        assert!(answer.body().await.complete);
    }
    let ids = |engine: &Engine| {
        let id = |record: &tandem_sim::Record| record.header("x-request-id").map(str::to_owned);
        engine.records().iter().map(id).collect::<BTreeSet<_>>()
    };
    for pair in &pairs {
        assert_eq!(ids(&pair.prefill), ids(&pair.decode));
        assert!(ids(&pair.decode).len() >= 2);
    }
    let answer = with_headers(&front, "plain", "", "").await;
    assert_eq!((answer.status.as_u16(), answer.header("routing-strategy")), (200, "least-request"));
    assert!(answer.body().await.complete);
    let engines: Vec<&Engine> = pairs.iter().flat_map(Pair::engines).chain(&plain).collect();
    settle(&tandems, &engines).await;
    drop(tandems);

    // A file that cannot be meant is refused at the start, with a reason.
    std::fs::write(&path, file.replace("  endpoints:", "  rolesets: [{name: x, prefill: [a]}]\n  endpoints:"))
        .expect("write");
    let args = ["--standalone", "--endpoints-config", path.to_str().expect("a path")].map(str::to_owned).to_vec();
    let refused = Tandem::try_start(TandemOptions { args, ..TandemOptions::default() }).await.expect_err("refused");
    assert!(refused.contains("has both endpoints and rolesets"), "{refused}");
}
