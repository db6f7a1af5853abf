//! The pages, called as a service.

use std::collections::{BTreeMap, HashMap};

use axum::body::Body;
use axum::http::{HeaderMap, Method, Request};
use http_body_util::BodyExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;

use super::*;
use crate::fleet::{Engine, Model, PartialRoleset, Pod, PodKey, PodSpec, PodState, Role, Roleset, Signals};
use crate::knobs::{Origin, Setting};
use crate::load::{Commit, DecodeCharge, EjectionPolicy, PrefillCharge, Verdicts};
use crate::routing::{
    BandUse, Considered, Decision, DecisionRecord, Explanation, FastPaths, Fate, PromptLength, RoutingError, Scores,
    Target, Terms, TokenCost,
};
use crate::telemetry::PodLabels;

fn pod(name: &str, role: Role) -> Arc<Pod> {
    let spec = PodSpec {
        key: PodKey { namespace: "ns".into(), name: name.into() },
        uid: "uid".into(),
        restarts: 0,
        model: "llama".into(),
        host: "fd00::1".into(),
        port: 8000,
        metric_port: 8001,
        engine: Engine::Vllm,
        kv_connector: None,
        bootstrap_port: 8998,
        role,
        roleset: Some("rs-0".into()),
        replica_index: None,
        serves_http: true,
        pd: true,
        draining: false,
        tls: false,
        rank: 0,
        ready: true,
        terminating: false,
        labels: Arc::new(BTreeMap::new()),
        config: None,
        also: Vec::new(),
        claim: None,
    };
    let labels = PodLabels { namespace: "ns".into(), pod: name.into(), model: "llama".into(), ..PodLabels::default() };
    Arc::new(Pod::new(spec, Arc::new(PodState::new(1, Arc::new(labels)))))
}

fn model(pods: Vec<Arc<Pod>>) -> Model {
    let of = |role| pods.iter().filter(|pod| pod.spec.role == role).cloned().collect::<Vec<_>>();
    Model {
        name: "llama".into(),
        routable: pods.clone(),
        rolesets: vec![Roleset {
            name: "rs-0".into(),
            prefill: of(Role::Prefill),
            decode: of(Role::Decode),
            prefill_replicas: 1,
            decode_replicas: 1,
        }],
        partial: vec![PartialRoleset { name: "rs-1".into(), prefill: 0, decode: 2 }],
        standalone: Vec::new(),
        config: None,
        config_disagreements: 2,
        config_pod: Some(PodKey { namespace: "ns".into(), name: "d".into() }),
        config_differing: vec![PodKey { namespace: "ns".into(), name: "p".into() }],
        commit: Arc::new(Commit::default()),
        pods,
        ..Model::default()
    }
}

fn state() -> AdminState {
    AdminState {
        replica: "gw-0".into(),
        token: None,
        plane: Arc::new(crate::state::plane::LocalPlane),
        fleet: Arc::new(Fleet::default()),
        metrics: Arc::new(Metrics::new("gw-0")),
        readiness: Arc::new(Readiness::default()),
        problems: Arc::new(Vec::new),
        journal: Arc::default(),
        report: Arc::new(Report::default()),
        clock: Clock::system(),
        max_metric_age: Duration::from_secs(3),
        cluster: None,
        before_metrics: Arc::new(|_| ()),
        exposing: Arc::new(Semaphore::new(1)),
    }
}

fn with_fleet(pods: Vec<Arc<Pod>>) -> AdminState {
    let state = state();
    let models = HashMap::from([("llama".into(), Arc::new(model(pods)))]);
    state.fleet.store(Snapshot::new(3, models));
    state
}

/// A request on these two fails, by fault of the decode pod and of the way between them, which ejects both for 10 s.
fn fail(state: &AdminState, prefill: &Pod, decode: &Pod) {
    let verdicts =
        Verdicts { decode: crate::load::Report::Failure, pair: crate::load::Report::Failure, ..Verdicts::default() };
    let policy = EjectionPolicy { failures: 1, ..EjectionPolicy::default() };
    let snapshot = state.fleet.load();
    let pairs = &snapshot.model("llama").unwrap().pairs;
    pairs.report(Some(&prefill.state), &decode.state, verdicts, &policy, state.clock.now(), 0);
}

async fn call(state: &AdminState, method: Method, path: &str) -> (StatusCode, HeaderMap, String) {
    let request = Request::builder().method(method).uri(path).body(Body::empty()).unwrap();
    let answer = TowerToHyperService::new(router(state.clone())).call(request).await.unwrap();
    let (head, body) = answer.into_parts();
    #[expect(clippy::disallowed_methods, reason = "an answer of our own")]
    let body = body.collect().await.unwrap().to_bytes();
    (head.status, head.headers, String::from_utf8(body.to_vec()).unwrap())
}

async fn get_json(state: &AdminState, path: &str) -> (StatusCode, Value) {
    let (status, headers, body) = call(state, Method::GET, path).await;
    assert_eq!(headers[CONTENT_TYPE], "application/json");
    (status, serde_json::from_str(&body).unwrap())
}

#[tokio::test]
async fn health_does_not_depend_on_anything() {
    let state = state();
    state.readiness.drain();
    assert_eq!(call(&state, Method::GET, "/healthz").await.0, StatusCode::OK);
}

#[tokio::test]
async fn readiness_tells_why() {
    let fresh = state();
    let (status, detail) = get_json(&fresh, "/readyz").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(detail["reasons"], json!(["no snapshot of the fleet yet"]));

    let empty = state();
    empty.fleet.store(Snapshot::new(1, HashMap::new()));
    let (status, detail) = get_json(&empty, "/readyz").await;
    assert_eq!((status, &detail["notes"]), (StatusCode::OK, &json!(["no routable pods"])));

    let mut full = with_fleet(vec![pod("p", Role::Prefill), pod("d", Role::Decode)]);
    let (status, detail) = get_json(&full, "/readyz").await;
    assert_eq!((status, &detail["ready"], &detail["routable_pods"]), (StatusCode::OK, &json!(true), &json!(2)));
    assert_eq!(detail["notes"], json!([]));

    full.report = Arc::new(Report { config_errors: 2, warnings: vec!["X is bad".into()], ..Report::default() });
    full.problems = Arc::new(|| vec!["pod ns/p: unusable annotation".into()]);
    let (status, detail) = get_json(&full, "/readyz").await;
    assert_eq!((status, &detail["notes"]), (StatusCode::OK, &json!(["configuration errors"])));
    assert_eq!(detail["config_warnings"], json!(["X is bad"]));
    assert_eq!(detail["problems"], json!(["pod ns/p: unusable annotation"]));

    full.readiness.drain();
    let (status, detail) = get_json(&full, "/readyz").await;
    assert_eq!((status, &detail["reasons"]), (StatusCode::SERVICE_UNAVAILABLE, &json!(["draining"])));
}

#[tokio::test]
async fn models_are_listed_as_the_reference_does() {
    let state = with_fleet(vec![pod("p", Role::Prefill)]);
    let (status, list) = get_json(&state, "/v1/models?x=y").await;
    assert_eq!(status, StatusCode::OK);
    let entry = json!({"id": "llama", "object": "model", "created": 0, "owned_by": "aibrix"});
    assert_eq!(list, json!({"object": "list", "data": [entry]}));
    for method in [Method::POST, Method::DELETE, Method::PUT] {
        let (status, headers, body) = call(&state, method, "/v1/models").await;
        assert_eq!((status, body.as_str()), (StatusCode::METHOD_NOT_ALLOWED, r#"{"error":"method not allowed"}"#));
        assert_eq!(headers["allow"], "GET,HEAD");
    }
}

#[tokio::test]
async fn unknown_paths_get_json() {
    let (status, body) = get_json(&state(), "/nope?secret=1").await;
    assert_eq!((status, body), (StatusCode::NOT_FOUND, json!({"error": "not found", "path": "/nope"})));
}

#[tokio::test]
async fn metrics_reflect_the_cells_of_the_moment() {
    let (prefill, decode) = (pod("p", Role::Prefill), pod("d", Role::Decode));
    let mut state = with_fleet(vec![Arc::clone(&prefill), Arc::clone(&decode)]);
    state.report = Arc::new(Report { config_errors: 1, ..Report::default() });
    state.problems = Arc::new(|| vec!["one".into()]);
    state.before_metrics = Arc::new(|metrics| metrics.set_buffered_bytes(77));
    fail(&state, &prefill, &decode);
    let charge = PrefillCharge::open(&prefill.state);
    let mut running = DecodeCharge::open(&decode.state);
    running.hand_over();
    let pending = DecodeCharge::open(&decode.state);
    let (status, headers, page) = call(&state, Method::GET, "/metrics").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(headers[CONTENT_TYPE], "text/plain; version=0.0.4; charset=utf-8");
    for line in [
        "tandem_pod_prefill_outstanding{namespace=\"ns\",pod_name=\"p\"} 1",
        "tandem_pod_decode_running{namespace=\"ns\",pod_name=\"d\"} 1",
        "tandem_pod_decode_pending{namespace=\"ns\",pod_name=\"d\"} 1",
        "model_replicas{model=\"llama\"} 2",
        "tandem_routable_pods{model=\"llama\"} 2",
        "tandem_config_disagreements{model=\"llama\"} 2",
        "tandem_ejected{model=\"llama\",scope=\"pod\"} 1",
        "tandem_ejected{model=\"llama\",scope=\"pair\"} 1",
        "tandem_ejections_total{scope=\"pair\"} 0",
        "tandem_snapshot_version 3",
        "tandem_config_errors 2",
        "tandem_buffered_bytes 77",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}\n{page}");
    }
    assert!(!page.contains("tandem_pod_metrics_age_seconds"));
    drop((charge, running, pending));
    let (_, _, page) = call(&state, Method::GET, "/metrics").await;
    let quiet = page.lines().filter(|line| line.starts_with("tandem_pod_") && line.ends_with(" 0")).count();
    assert_eq!(quiet, 6, "{page}");
}

#[tokio::test]
async fn a_pod_that_ended_has_no_series_once_its_requests_are_over() {
    let scraped = |pod: &Pod| {
        pod.state.signals.store(Arc::new(Signals { at: Some(Clock::system().now()), ..Signals::default() }));
    };
    let changed = |name: &str, change: fn(&mut PodSpec)| {
        let mut pod = Arc::unwrap_or_clone(pod(name, Role::Decode));
        change(&mut pod.spec);
        scraped(&pod);
        Arc::new(pod)
    };
    let (well, failed) = (changed("well", |_| ()), changed("evicted", |spec| spec.terminating = true));
    let starting = changed("starting", |spec| spec.ready = false);
    let state = with_fleet(vec![Arc::clone(&well), Arc::clone(&failed), starting]);
    let has = |page: &str, name: &str, pod: &str| {
        page.lines().any(|line| line.starts_with(name) && line.contains(&format!("\"{pod}\"")))
    };
    let mut running = DecodeCharge::open(&failed.state);
    running.hand_over();
    state.metrics.scrape_failed(&failed.state.labels);
    let (_, _, page) = call(&state, Method::GET, "/metrics").await;
    assert!(has(&page, "tandem_pod_decode_running", "evicted"), "its requests are seen to their end\n{page}");
    // The age is that of pods that get requests: it is asked no more, and not because it does not answer.
    for (pod, shown) in [("well", true), ("evicted", false), ("starting", false)] {
        assert_eq!(has(&page, "tandem_pod_metrics_age_seconds", pod), shown, "{pod}\n{page}");
    }
    drop(running);
    let (_, _, page) = call(&state, Method::GET, "/metrics").await;
    assert!(!page.contains("\"evicted\""), "{page}");
    assert!(has(&page, "tandem_pod_decode_running", "starting"));
}

#[tokio::test(start_paused = true)]
async fn the_fleet_page_shows_what_routing_sees() {
    let (prefill, decode) = (pod("p", Role::Prefill), pod("d", Role::Decode));
    let mut state = with_fleet(vec![Arc::clone(&prefill), Arc::clone(&decode)]);
    let setting = Setting { name: "AIBRIX_AUTH_BEARER_TOKEN", value: "[secret]".into(), origin: Origin::Environment };
    state.report = Arc::new(Report { settings: vec![setting], ..Report::default() });
    let signals =
        Signals { at: Some(state.clock.now()), running: Some(4.0), kv_usage: Some(f64::NAN), ..Signals::unknown() };
    decode.state.signals.store(Arc::new(signals));
    let _charge = DecodeCharge::open(&decode.state);
    fail(&state, &prefill, &decode);
    tokio::time::advance(Duration::from_millis(3001)).await;
    let (status, page) = get_json(&state, "/debug/fleet").await;
    assert_eq!((status, &page["snapshot_version"]), (StatusCode::OK, &json!(3)));
    let llama = &page["models"]["llama"];
    assert_eq!(llama["rolesets"][0]["decode"], json!(["ns/d"]));
    assert_eq!(llama["partial_rolesets"], json!([{"name": "rs-1", "prefill": 0, "decode": 2}]));
    assert_eq!((&llama["config_pod"], &llama["config_disagreements"]), (&json!("ns/d"), &json!(2)));
    assert_eq!(llama["config_differing_pods"], json!(["ns/p"]));
    let pods = llama["pods"].as_array().unwrap();
    assert_eq!(pods[0]["signals"]["age_ms"], json!(null));
    let decode = &pods[1];
    assert_eq!(decode["address"], "[fd00::1]:8000");
    assert_eq!(decode["metric_address"], "[fd00::1]:8001");
    assert_eq!(decode["role"], "decode");
    assert_eq!(decode["in_flight"]["decodes_pending"], 1);
    assert_eq!(decode["signals"]["running"], 4.0);
    assert_eq!(decode["signals"]["kv_usage"], json!(null));
    assert_eq!(decode["signals"]["age_ms"], 3001.0);
    assert_eq!(decode["signals"]["fresh"], false);
    let well = json!({"consecutive_failures": 0, "ejected_for_s": null, "ejections_in_a_row": 0, "probing": false});
    let ejected = json!({"consecutive_failures": 1, "ejected_for_s": 6.999, "ejections_in_a_row": 1, "probing": false});
    assert_eq!((&decode["health"], &pods[0]["health"]), (&ejected, &well));
    // The pods of this test share a slot, so both have the first one's name.
    assert_eq!(llama["failing_pairs"], json!([{"prefill": "ns/p", "decode": "ns/p", "health": ejected}]));
    assert_eq!(page["config"]["settings"][0]["value"], "[secret]");
}

#[tokio::test]
async fn decisions_are_shown_with_their_numbers() {
    let state = with_fleet(vec![pod("p", Role::Prefill), pod("d", Role::Decode)]);
    let (_, page) = get_json(&state, "/debug/decisions").await;
    assert_eq!((&page["snapshot_version"], &page["decisions"]), (&json!(3), &json!([])));
    let considered = |slot, terms| Considered {
        slot,
        fate: Fate::Scored,
        ledger_age: None,
        score: Some(0.5),
        count: 2.0,
        metrics_age: Some(Duration::from_millis(20)),
        terms,
    };
    let snapshot = state.fleet.load();
    let model = snapshot.model("llama").unwrap();
    let prefill = Terms::Prefill { match_pct: 40, active_tokens: 7, kv_tokens: 9, mean_prefill_seconds: None };
    let decision = Decision {
        target: Target::Pair { prefill: Arc::clone(&model.pods[0]), decode: Arc::clone(&model.pods[1]) },
        strategy: crate::routing::Strategy::Pd,
        policies: None,
        fast_paths: FastPaths::default(),
        band: Some(BandUse { roleset: "rs-0".into(), applied: true }),
        prefix_match_pct: Some(40),
        best_match_pct: Some(40),
        candidates: (1, 1),
        scores: Scores { total: Some(0.75), ..Scores::default() },
        missing: crate::routing::MissingSignals::default(),
        tokens: TokenCost { prefill: Some(3600), decode: None },
        ejections_ignored: false,
        explanation: Explanation {
            prefills: vec![considered(1, prefill), considered(99, prefill)],
            ..Explanation::default()
        },
    };
    let record = |outcome| DecisionRecord {
        at: state.clock.now(),
        request_id: "r-1".into(),
        model: "llama".into(),
        snapshot_version: 3,
        profile: Some("fast".into()),
        length: PromptLength::MoreThan(100),
        prompt_tokens: 25,
        conflicts: 2,
        blind: false,
        outcome,
    };
    state.journal.push(Arc::new(record(Ok(decision))));
    let (_, page) = get_json(&state, "/debug/decisions").await;
    let shown = &page["decisions"][0];
    assert_eq!(shown["request_id"], "r-1");
    assert_eq!(shown["prompt_length"], json!({"more_than_tokens": 100}));
    assert_eq!(shown["target"], json!({"prefill": "ns/p", "decode": "ns/d", "roleset": "rs-0"}));
    assert_eq!(shown["band"], json!({"roleset": "rs-0", "applied": true}));
    assert_eq!(shown["steps"], "band");
    assert_eq!(shown["scores"]["total"], 0.75);
    assert_eq!(shown["charged_tokens"], json!({"prefill": 3600, "decode": null}));
    assert_eq!(shown["prefill_pods"][0]["prefix_match_pct"], 40);
    assert_eq!(shown["prefill_pods"][0]["metrics_age_ms"], 20.0);
    assert_eq!(shown["prefill_pods"][1]["pod"], "gone (slot 99)");
    let (_, brief) = get_json(&state, "/debug/decisions?brief=true").await;
    assert_eq!((&brief["decisions"][0]["scores"], brief["decisions"][0].get("prefill_pods")), (&shown["scores"], None));
    state.journal.push(Arc::new(record(Err(RoutingError::NoPods))));
    for (query, count) in [("limit=1", 1), ("limit=0", 0), ("limit=9", 2), ("request_id=r-1", 2), ("request_id=r-2", 0)]
    {
        let (_, page) = get_json(&state, &format!("/debug/decisions?{query}")).await;
        assert_eq!(page["decisions"].as_array().unwrap().len(), count, "{query}");
    }
    let (_, page) = get_json(&state, "/debug/decisions").await;
    assert_eq!(page["decisions"].as_array().unwrap().len(), 2);
    assert!(page["decisions"].as_array().unwrap().iter().any(|shown| shown["error"] == "no ready pods"));
}

/// The answer to a browser.
async fn browse(state: &AdminState, path: &str, token: Option<&str>) -> (StatusCode, HeaderMap, String) {
    let mut request = Request::builder().uri(path).header("accept", "text/html,*/*;q=0.8");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let request = request.body(Body::empty()).unwrap();
    let answer = TowerToHyperService::new(router(state.clone())).call(request).await.unwrap();
    let (head, body) = answer.into_parts();
    #[expect(clippy::disallowed_methods, reason = "an answer of our own")]
    let body = body.collect().await.unwrap().to_bytes();
    (head.status, head.headers, String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn a_browser_gets_a_page_whose_script_is_the_only_one_allowed() {
    let state = with_fleet(vec![pod("p", Role::Prefill)]);
    let mut nonces = std::collections::HashSet::new();
    for path in ["/debug/fleet", "/debug/fleet?format=html"] {
        let (status, headers, page) = browse(&state, path, None).await;
        assert_eq!((status, &headers[CONTENT_TYPE]), (StatusCode::OK, &"text/html; charset=utf-8".parse().unwrap()));
        let policy = headers["content-security-policy"].to_str().unwrap();
        let nonce = policy.split("script-src 'nonce-").nth(1).unwrap().split('\'').next().unwrap();
        assert!(policy.starts_with("default-src 'none'; connect-src 'self'"), "{policy}");
        assert_eq!(page.matches(&format!("nonce=\"{nonce}\"")).count(), 2, "style and script");
        assert!(["%NONCE%", "%STYLE%", "%SCRIPT%"].iter().all(|place| !page.contains(place)));
        assert!(nonces.insert(nonce.to_owned()), "each answer has its own");
    }
    let (_, headers, body) = browse(&state, "/debug/fleet?format=json", None).await;
    assert_eq!(headers[CONTENT_TYPE], "application/json");
    assert_eq!(serde_json::from_str::<Value>(&body).unwrap()["replica"], "gw-0");
    assert_eq!(browse(&state, "/debug/fleet?format=xml", None).await.0, StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn a_token_guards_what_tells_about_the_fleet() {
    let mut state = with_fleet(vec![pod("p", Role::Prefill)]);
    state.token = Some(Secret::new("hunter2"));
    for path in ["/metrics", "/debug/fleet", "/debug/decisions", "/debug/state"] {
        let (status, headers, body) = browse(&state, path, None).await;
        assert_eq!((status, body.as_str()), (StatusCode::UNAUTHORIZED, r#"{"error":"a token is needed"}"#), "{path}");
        let challenges: Vec<_> = headers.get_all("www-authenticate").iter().collect();
        assert_eq!(challenges, ["Bearer", "Basic realm=\"tandem\", charset=\"UTF-8\""]);
        assert_eq!(browse(&state, path, Some("wrong")).await.0, StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(browse(&state, path, Some("hunter2")).await.0, StatusCode::OK, "{path}");
    }
    for path in ["/healthz", "/readyz", "/v1/models"] {
        assert_eq!(browse(&state, path, None).await.0, StatusCode::OK, "{path}");
    }
    assert_eq!(browse(&state, "/nope", None).await.0, StatusCode::NOT_FOUND);
}

/// Adapters have the pods of their base model: every series of a pod is there once, and so is its entry on the page.
#[tokio::test]
async fn a_pod_is_shown_once_however_many_models_it_serves() {
    let state = state();
    let specs = [crate::fleet::fixture::spec("a"), crate::fleet::fixture::spec("b")];
    let adapter = |name: &str, instances: &[&str]| crate::fleet::AdapterSpec {
        namespace: "default".into(),
        name: name.into(),
        instances: instances.iter().map(|name| Arc::from(*name)).collect(),
    };
    let adapters = [adapter("l", &["a"]), adapter("k", &["a", "b"]), adapter("none", &[])];
    state.fleet.store(crate::fleet::build_all(&Snapshot::default(), &specs, &adapters, &mut 0));
    let (_, _, page) = call(&state, Method::GET, "/metrics").await;
    let count = |start: &str| page.lines().filter(|line| line.starts_with(start)).count();
    assert_eq!(count("tandem_pod_decode_running{"), 2, "{page}");
    assert_eq!(count("tandem_ejected{"), 2, "pods and pairs of one model");
    for (model, replicas) in [("m", 2), ("l", 1), ("k", 2), ("none", 0)] {
        let line = page
            .lines()
            .find(|line| line.starts_with("tandem_routable_pods{") && line.contains(&format!("\"{model}\"")));
        assert!(line.is_some_and(|line| line.ends_with(&format!(" {replicas}"))), "{model}: {line:?}");
    }
    let (_, fleet) = get_json(&state, "/debug/fleet").await;
    let models = &fleet["models"];
    assert_eq!(models["m"]["pods"].as_array().unwrap().len(), 2);
    assert_eq!((&models["m"]["alias_of"], &models["m"]["instances"]), (&Value::Null, &Value::Null));
    assert_eq!(models["k"]["pods"], json!([]));
    assert_eq!(models["k"]["instances"], json!(["default/a", "default/b"]));
    assert_eq!((&models["k"]["alias_of"], &models["none"]["alias_of"]), (&json!("m"), &Value::Null));
    assert_eq!(models["k"]["routable_pods"], 2);
    let (_, ready) = get_json(&state, "/readyz").await;
    assert_eq!(ready["routable_pods"], 2);
    let (_, listed) = get_json(&state, "/v1/models").await;
    let names: Vec<&str> =
        listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["k", "l", "m", "none"]);
}
