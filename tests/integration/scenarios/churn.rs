//! Pods that come, go and change while requests are under way.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tandem_sim::{Engine, EngineConfig, Hold, Record};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{Dice, Pair, ask, chat, engine_shows, fleet_shows, pod_of, routable, settle_pairs, slow};
use crate::harness::engines::{MODEL, pd_by_default};
use crate::harness::fleet::{Fleet, FleetOptions};
use crate::harness::http::Answer;
use crate::harness::pods::PodManifest;
use crate::harness::tandem::{Tandem, TandemOptions};
use crate::harness::{SOON, eventually, within};

/// Models and rolesets: the four places that a pod can be in.
const PLACES: [(&str, &str); 4] = [("m", "a"), ("m", "b"), ("n", "a"), ("n", "b")];

/// Which prefill pod and which decode pod is in each place.
type State = [(usize, usize); 4];

/// States follow each other so that every pod changes its partner, and some their model.
const STATES: [State; 4] = [
    [(0, 0), (1, 1), (2, 2), (3, 3)],
    [(0, 1), (1, 0), (2, 3), (3, 2)],
    [(2, 1), (1, 2), (0, 3), (3, 0)],
    [(2, 0), (3, 1), (0, 2), (1, 3)],
];

fn manifests(pairs: &[Pair], state: &State) -> Vec<PodManifest> {
    let both = PLACES.iter().zip(state).flat_map(|((model, roleset), (prefill, decode))| {
        [("p", "prefill", *prefill), ("d", "decode", *decode)].map(|(letter, role, number)| {
            let engine = if role == "prefill" { &pairs[number].prefill } else { &pairs[number].decode };
            PodManifest::new(&format!("{letter}{number}"), model, Engine::address(engine))
                .role(roleset, role)
                .config(&pd_by_default())
        })
    });
    both.collect()
}

fn in_force(page: &Value, state: &State) -> bool {
    PLACES.iter().zip(state).all(|((model, roleset), (prefill, decode))| {
        let rolesets = page["models"][model]["rolesets"].as_array();
        rolesets.is_some_and(|sets| {
            sets.iter().any(|set| {
                set["name"] == *roleset
                    && set["prefill"] == json!([format!("default/p{prefill}")])
                    && set["decode"] == json!([format!("default/d{decode}")])
            })
        })
    })
}

/// A request as its client saw it.
#[derive(Clone, Copy, Debug)]
struct Seen {
    place: usize,
    sent: Instant,
    answered: Instant,
}

/// When a state may have been in force: from when it was written, until its successor was seen.
#[derive(Clone, Copy, Debug)]
struct Span {
    state: usize,
    written: Instant,
    over: Option<Instant>,
}

/// Label flips exchange partners and models. Each pair at the engines shared its roleset and its model, in a state that
/// was in force while the request was under way.
#[tokio::test(flavor = "multi_thread")]
async fn r38_pairs_share_roleset_and_model_while_labels_flip() {
    let mut pairs = Vec::new();
    for number in 0..4 {
        let both_models = |config| EngineConfig { aliases: vec!["n".to_owned()], ..config };
        pairs.push(Pair::start(number, "m", both_models).await);
    }
    let options = FleetOptions { replicas: 1, envoy: false, ..FleetOptions::default() };
    let mut fleet = Fleet::start(manifests(&pairs, &STATES[0]), options).await;
    let path = fleet.paths().remove(0);
    let seen: Arc<Mutex<HashMap<String, Seen>>> = Arc::default();
    let done = tokio_util::sync::CancellationToken::new();
    let mut clients = JoinSet::new();
    for client in 0..8 {
        let (path, seen, done) = (path.clone(), Arc::clone(&seen), done.clone());
        clients.spawn(async move {
            let mut dice = Dice(client);
            while !done.is_cancelled() {
                let model = if dice.below(2) == 0 { "m" } else { "n" };
                let place = if model == "m" { 0 } else { 2 };
                let sent = Instant::now();
                let answer = ask(&path, chat(model, &format!("{:x}", dice.next()), 1, false)).send().await;
                let (status, id) = (answer.status, answer.header("request-id").to_owned());
                let body = answer.body().await;
                assert!(status == 200 && body.complete, "{status}: {body:?}");
                let request = Seen { place, sent, answered: Instant::now() };
                assert!(seen.lock().expect("seen").insert(id, request).is_none(), "ids are unique");
            }
        });
    }

    let start = Instant::now();
    let mut spans = vec![Span { state: 0, written: start, over: None }];
    let enough = |flips: usize| flips >= 8 && seen.lock().expect("seen").len() >= 3_000;
    while !enough(spans.len() - 1) && (spans.len() < 4 || start.elapsed() < Duration::from_secs(15)) {
        let state = spans.len() % STATES.len();
        spans.push(Span { state, written: Instant::now(), over: None });
        fleet.pods.put(manifests(&pairs, &STATES[state]));
        fleet_shows(&fleet.tandems, "the flipped labels", |page| in_force(page, &STATES[state])).await;
        let before = spans.len() - 2;
        spans[before].over = Some(Instant::now());
    }
    done.cancel();
    while let Some(client) = clients.join_next().await {
        client.expect("no client saw an error");
    }
    settle_pairs(&fleet, &pairs).await;

    let by_id = |engine: fn(&Pair) -> &Engine| {
        let mut found: HashMap<String, (usize, Record)> = HashMap::new();
        for pair in &pairs {
            for record in engine(pair).records() {
                let id = record.header("x-request-id").expect("an id").to_owned();
                assert!(found.insert(id, (pair.number, record)).is_none(), "one leg of each kind");
            }
        }
        found
    };
    let (prefills, decodes) = (by_id(|pair| &pair.prefill), by_id(|pair| &pair.decode));
    let seen = seen.lock().expect("seen");
    println!("{} requests, {} flips in {:?}", seen.len(), spans.len() - 1, start.elapsed());
    assert!(seen.len() >= 50, "only {} requests", seen.len());
    assert_eq!((prefills.len(), decodes.len()), (seen.len(), seen.len()));
    for (id, request) in seen.iter() {
        let ((prefill, first), (decode, second)) = (&prefills[id], &decodes[id]);
        let model = PLACES[request.place].0;
        assert_eq!((&first.json()["model"], &second.json()["model"]), (&json!(model), &json!(model)));
        let legal = spans.iter().any(|span| {
            let while_under_way = request.answered >= span.written && span.over.is_none_or(|over| request.sent <= over);
            let places = &STATES[span.state][request.place..request.place + 2];
            while_under_way && places.contains(&(*prefill, *decode))
        });
        assert!(legal, "p{prefill} and d{decode} for {request:?}; states: {spans:?}");
    }
}

/// A terminating pod gets no new request; what runs on it ends as if nothing had happened.
#[tokio::test(flavor = "multi_thread")]
async fn r46_a_terminating_pod_finishes_its_streams_and_gets_no_more() {
    let timing = slow(Duration::ZERO, Duration::from_millis(150));
    let mut pairs = Vec::new();
    for number in 0..2 {
        pairs.push(Pair::start(number, MODEL, |config| config.timing(timing)).await);
    }
    let least = json!({"prefillScorePolicy": "least_request", "decodeScorePolicy": "least_request"});
    let config = json!({"profiles": {"default": {"routingStrategy": "pd", "routingConfig": least}}});
    let mut fleet = Fleet::start(pairs.iter().flat_map(|pair| pair.pods(&config)), FleetOptions::default()).await;
    // Two of each replica's four end up on either pair.
    let mut streams = Vec::new();
    for path in fleet.paths() {
        for number in 0..4 {
            let answer = ask(&path, chat(MODEL, &format!("{number} tells a long story"), 20, true)).send().await;
            assert_eq!(answer.status, 200);
            streams.push(answer);
        }
    }
    assert!(streams.iter().any(|answer| answer.header("target-pod") == "d0"), "somebody is on the pod that goes");
    for name in ["p0", "d0"] {
        fleet.pods.change(name, PodManifest::terminating);
    }
    routable(&fleet.tandems, &["p1", "d1"]).await;
    pairs[0].engines().into_iter().for_each(Engine::clear_records);
    let mut late = JoinSet::new();
    for path in fleet.paths() {
        for number in 0..10 {
            late.spawn(ask(&path, chat(MODEL, &format!("{number} is late"), 2, false)).send());
        }
    }
    for answer in late.join_all().await {
        assert_eq!((answer.status.as_u16(), answer.header("target-pod")), (200, "d1"));
        assert!(answer.body().await.complete);
    }
    assert!(pairs[0].engines().iter().all(|engine| engine.records().is_empty()), "no new request");
    for stream in streams {
        let (events, proper) = stream.events().collect().await;
        assert!(proper && events.last().is_some_and(|last| last == "[DONE]"), "{:?}", events.last());
        assert_eq!(events.len(), 22, "a role, 20 tokens, an end: {events:?}");
    }
    settle_pairs(&fleet, &pairs).await;
}

/// In-flight counts of a pod in `/debug/fleet`: prefills, decodes pending, decodes running.
async fn counts(tandem: &Tandem, name: &str) -> [u64; 3] {
    let page = tandem.admin_json("/debug/fleet").await;
    let pod = pod_of(&page, name).unwrap_or_else(|| panic!("no pod {name}"));
    ["prefills", "decodes_pending", "decodes_running"].map(|count| pod["in_flight"][count].as_u64().expect("a count"))
}

/// A release belongs to the incarnation that was charged. The harness looks for counts below zero all the time.
#[tokio::test(flavor = "multi_thread")]
async fn r48_a_flapping_pod_never_counts_below_zero() {
    let pairs = [Pair::start(0, MODEL, |config| config).await];
    let options = FleetOptions { replicas: 1, ..FleetOptions::default() };
    let mut fleet = Fleet::start(pairs[0].pods(&pd_by_default()), options).await;
    for (round, path) in fleet.paths().into_iter().enumerate() {
        let hold = pairs[0].decode.hold();
        let mut requests = JoinSet::new();
        let charge = |requests: &mut JoinSet<Answer>, count: usize| {
            for number in 0..count {
                requests.spawn(ask(&path, chat(MODEL, &format!("{number}"), 2, number % 2 == 0)).send());
            }
        };
        charge(&mut requests, 5);
        within("five at the decode engine", hold.wait_for(5)).await;
        assert_eq!(counts(&fleet.tandems[0], "default/d0").await, [0, 0, 5]);
        for name in ["p0", "d0"] {
            fleet.pods.remove(name);
        }
        routable(&fleet.tandems, &[]).await;
        let again = pairs[0].pods(&pd_by_default()).map(|pod| pod.uid(&format!("another one, {round}")));
        fleet.pods.put(again);
        routable(&fleet.tandems, &["p0", "d0"]).await;
        assert_eq!(counts(&fleet.tandems[0], "default/d0").await, [0, 0, 0], "a new incarnation");
        charge(&mut requests, 3);
        within("eight at the decode engine", hold.wait_for(8)).await;
        assert_eq!(counts(&fleet.tandems[0], "default/d0").await, [0, 0, 3]);
        hold.release();
        for answer in requests.join_all().await {
            assert_eq!(answer.status, 200);
            assert!(answer.body().await.complete);
        }
        settle_pairs(&fleet, &pairs).await;
        assert_eq!(counts(&fleet.tandems[0], "default/d0").await, [0, 0, 0]);
    }
}

/// Names are unique in a namespace only, and an address says nothing about who answers there.
#[tokio::test(flavor = "multi_thread")]
async fn r50_namespaces_and_reused_addresses_do_not_mix() {
    let mut pairs = Vec::new();
    for number in 0..2 {
        let both_models = |config| EngineConfig { aliases: vec!["other".to_owned()], ..config };
        pairs.push(Pair::start(number, MODEL, both_models).await);
    }
    // Both pairs are called p0 and d0; the harness's own file knows one pod of a name.
    let named = |pair: &Pair, namespace: &str, model: &str| {
        ["prefill", "decode"].map(|role| {
            let engine = if role == "prefill" { &pair.prefill } else { &pair.decode };
            let name = format!("{}0", &role[..1]);
            let pod = PodManifest::new(&name, model, Engine::address(engine)).role("rs0", role);
            pod.config(&pd_by_default()).namespace(namespace).uid(&format!("{name} in {namespace}"))
        })
    };
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("pods.yaml");
    let write = |pods: Vec<PodManifest>| {
        let items: Vec<&Value> = pods.iter().map(PodManifest::manifest).collect();
        let beside = directory.path().join("new");
        std::fs::write(&beside, json!({"kind": "List", "items": items}).to_string()).expect("write");
        std::fs::rename(&beside, &file).expect("move");
    };
    write(named(&pairs[0], "ns1", MODEL).into_iter().chain(named(&pairs[1], "ns2", MODEL)).collect());
    let options = TandemOptions { pods: file.clone(), front: true, ..TandemOptions::default() };
    let tandems = [Tandem::start(options).await];
    tandems[0].wait_ready().await;
    let path = crate::harness::http::base(tandems[0].front().expect("a front"));

    let holds: Vec<Hold> = pairs.iter().map(|pair| pair.decode.hold()).collect();
    let mut requests = JoinSet::new();
    for number in 0..6 {
        requests.spawn(ask(&path, chat(MODEL, &format!("{number}"), 2, false)).send());
    }
    let held = async || (holds.iter().map(Hold::waiting).sum::<usize>() == 6).then_some(());
    eventually(SOON, "all six are held", held).await;
    // How they are divided is not the point (a scrape in between can tip the scales), but that both get some, and that
    // each pod counts its own.
    for (namespace, hold) in ["ns1", "ns2"].into_iter().zip(&holds) {
        let waiting = hold.waiting();
        assert!(waiting > 0, "{namespace} got nothing");
        assert_eq!(counts(&tandems[0], &format!("{namespace}/d0")).await, [0, 0, waiting as u64]);
    }
    holds.into_iter().for_each(Hold::release);
    assert!(requests.join_all().await.iter().all(|answer| answer.status == 200));

    // The second pair's addresses now belong to pods of another model.
    write(named(&pairs[0], "ns1", MODEL).into_iter().chain(named(&pairs[1], "ns3", "other")).collect());
    fleet_shows(&tandems, "the new owner", |page| pod_of(page, "ns3/d0").is_some() && pod_of(page, "ns2/d0").is_none())
        .await;
    for (model, target, elsewhere) in [(MODEL, 0, 1), ("other", 1, 0)] {
        pairs.iter().flat_map(Pair::engines).for_each(Engine::clear_records);
        for number in 0..10 {
            let answer = ask(&path, chat(model, &format!("{number}"), 2, false)).send().await;
            assert_eq!(answer.status, 200);
            assert!(answer.body().await.complete);
        }
        assert_eq!(pairs[target].engines().map(|engine| engine.records().len()), [10, 10], "{model}");
        assert_eq!(pairs[elsewhere].engines().map(|engine| engine.records().len()), [0, 0], "{model}");
    }
    let engines: Vec<&Engine> = pairs.iter().flat_map(Pair::engines).collect();
    super::settle(&tandems, &engines).await;
}

/// A changed port label counts from the next request on; a manifest that cannot be read leaves what was known; an
/// annotation that cannot be read leaves the pod's last good one.
#[tokio::test(flavor = "multi_thread")]
async fn r51_a_port_change_counts_and_a_broken_manifest_does_not() {
    let pairs = [Pair::start(0, MODEL, |config| config).await, Pair::start(1, MODEL, |config| config).await];
    let mut fleet = Fleet::start(pairs[0].pods(&pd_by_default()), FleetOptions::default()).await;
    let paths = fleet.paths();
    let serves = async |pair: &Pair, what: &str| {
        for path in &paths {
            pairs.iter().flat_map(Pair::engines).for_each(Engine::clear_records);
            let answer = ask(path, chat(MODEL, what, 2, false)).send().await;
            assert_eq!(answer.status, 200, "{what}");
            assert_eq!(answer.header("routing-strategy"), "pd", "{what}");
            assert!(answer.body().await.complete);
            for engine in pair.engines() {
                engine_shows("the request", engine, |engine| engine.records().len() == 1).await;
            }
        }
    };
    serves(&pairs[0], "the old port").await;
    let ports = pairs[1].engines().map(|engine| Engine::address(engine).port().to_string());
    let moved = |pods: &mut crate::harness::pods::PodsFile| {
        for (name, port) in ["p0", "d0"].iter().zip(&ports) {
            pods.change(name, |pod| pod.label("model.aibrix.ai/port", port));
        }
    };
    moved(&mut fleet.pods);
    fleet_shows(&fleet.tandems, "the new ports", |page| {
        ["p0", "d0"].iter().zip(&ports).all(|(name, port)| {
            let pod = pod_of(page, &format!("default/{name}"));
            pod.is_some_and(|pod| pod["address"] == format!("127.0.0.1:{port}"))
        })
    })
    .await;
    serves(&pairs[1], "the new port").await;

    let good = std::fs::read(fleet.pods.path()).expect("the pods file");
    let noticed = |page: &Value| page["problems"].as_array().is_some_and(|problems| !problems.is_empty());
    for broken in [&good[..good.len() / 2], b"\xff\xfe", b"- [unclosed"] {
        // In place, as an editor or a failing template would do it.
        std::fs::write(fleet.pods.path(), broken).expect("write");
        fleet_shows(&fleet.tandems, "the problem", noticed).await;
        serves(&pairs[1], "on the last good manifest").await;
    }
    std::fs::write(fleet.pods.path(), &good).expect("write");
    fleet_shows(&fleet.tandems, "no problem", |page| page["problems"] == json!([])).await;

    fleet.pods.change("p0", |pod| pod.annotation("model.aibrix.ai/config", "{\"profiles\": {\"default\""));
    fleet.pods.change("d0", |pod| pod.annotation("model.aibrix.ai/config", "nonsense"));
    let both = |page: &Value| page["problems"].as_array().is_some_and(|problems| problems.len() == 2);
    fleet_shows(&fleet.tandems, "two problems", both).await;
    serves(&pairs[1], "on the last good annotation").await;
    settle_pairs(&fleet, &pairs).await;
}
