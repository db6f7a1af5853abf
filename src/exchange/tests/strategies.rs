//! Headers that steer the choice of a pod: `routing-strategy`, `external-filter` and the session headers.

use super::*;
use crate::fleet::ModelConfig;
use crate::knobs::PdKnobs;
use crate::telemetry::FleetGauges;

/// Four pods without roles, 10.0.0.0 to 10.0.0.3; 0 and 1 in zone a, 2 in zone b.
fn plain() -> Vec<PodSpec> {
    let zones = [Some("a"), Some("a"), Some("b"), None];
    let pod = |(number, zone): (usize, Option<&str>)| PodSpec {
        host: Arc::from(format!("10.0.0.{number}")),
        labels: Arc::new(zone.iter().map(|zone| ("zone".to_owned(), (*zone).to_owned())).collect()),
        ..spec(&format!("pod{number}"), Role::Other, None)
    };
    zones.into_iter().enumerate().map(pod).collect()
}

fn configured(config: &str) -> Vec<PodSpec> {
    let (config, _) = ModelConfig::parse(config, &PdKnobs::default());
    let config = Arc::new(config.unwrap());
    plain().into_iter().map(|pod| PodSpec { config: Some(Arc::clone(&config)), ..pod }).collect()
}

/// Sends one request; names may come several times.
fn send(world: &Arc<World>, pairs: &[(&'static str, &[u8])]) -> Run {
    let Event::Head(mut request) = head(&[]) else { panic!() };
    for (name, value) in pairs {
        request.headers.append(*name, HeaderValue::from_bytes(value).unwrap());
    }
    let mut run = Run::new(Arc::clone(world));
    run.feed(Event::Head(request)).feed(body(BODY));
    run
}

fn target(run: &Run) -> String {
    let plans =
        run.effects.iter().filter_map(|effect| if let Effect::Route(plan) = effect { Some(plan) } else { None });
    let targets: Vec<_> = plans.map(|plan| plan.address.clone().expect("a pod").to_string()).collect();
    assert_eq!(targets.len(), 1, "{:?}", run.effects);
    targets[0].clone()
}

/// R92: a strategy that does not exist is refused, wherever it is named, and never replaced by another.
#[test]
fn r92_bad_strategies_are_refused() {
    let from_header = world_with(&plain(), |_| {});
    for name in [
        "PD",
        "Random",
        "least_request",
        "round-robin",
        "pd:0",
        "slo-best",
        "random,",
        "random,,throughput",
        "random:",
        "random:-1",
        "random:1.5",
        "random:NaN",
        "random:1000001",
        "random:0",
        "random:0,throughput:0",
        "a:2,b",
        ",",
        ":",
        "\u{ff}",
    ] {
        let run = send(&from_header, &[("routing-strategy", name.as_bytes())]);
        let error = run.refusal();
        assert_eq!((error.status.as_u16(), error.reason), (400, Reason::BadStrategy), "{name}");
        for marker in ["x-error-invalid-routing-strategy", "x-error-routing"] {
            assert_eq!(error.headers()[marker], "true", "{name}");
        }
        run.oracle();
    }
    let by_lock = world_with(&configured(r#"{"lockedRoutingStrategy": "random,"}"#), |_| {});
    let run = send(&by_lock, &[]);
    assert_eq!(run.refusal().reason, Reason::BadStrategy);
    run.oracle();
    // A bad profile is as good as none: the gateway's own strategy applies, and a header wins as ever.
    let bad = configured(r#"{"profiles": {"default": {"routingStrategy": "random:x"}}}"#);
    let by_profile = world_with(&bad, |knobs| knobs.routing_algorithm = Some("least-request".to_owned()));
    for (headers, strategy) in [(&[][..], "least-request"), (&[("routing-strategy", &b"random"[..])], "random")] {
        let run = send(&by_profile, headers);
        assert_eq!(run.exchange.record().strategy.as_deref(), Some(strategy));
    }
    // Nothing wins over a bad lock.
    assert_eq!(send(&by_lock, &[("routing-strategy", b"random")]).refusal().reason, Reason::BadStrategy);
    // A good lock wins over any header, even one that is no text.
    let locked = world_with(&configured(r#"{"lockedRoutingStrategy": "throughput:2,least-request"}"#), |_| {});
    for header in [&b"round-robin"[..], b"\xff"] {
        let run = send(&locked, &[("routing-strategy", header)]);
        let Some(Effect::Route(plan)) = run.effects.iter().find(|effect| matches!(effect, Effect::Route(_))) else {
            panic!("{:?}", run.effects)
        };
        assert!(plan.set_headers.contains(&("routing-strategy", "least-request,throughput:2".to_owned())));
    }
}

#[test]
fn lists_come_from_everywhere() {
    for (specs, default, header) in [
        (configured(r#"{"profiles": {"default": {"routingStrategy": "power-of-two:2,prefix-cache"}}}"#), None, None),
        (plain(), Some("power-of-two:2,prefix-cache"), None),
        (plain(), None, Some(" prefix-cache , power-of-two:2,random:0 ")),
    ] {
        let world = world_with(&specs, |knobs| knobs.routing_algorithm = default.map(str::to_owned));
        let headers: Vec<_> = header.iter().map(|header| ("routing-strategy", header.as_bytes())).collect();
        let mut run = send(&world, &headers);
        run.feed(answer_head(200)).feed(chunk("{}", true));
        assert_eq!(run.record().strategy.as_deref(), Some("power-of-two:2,prefix-cache"));
        let Some(Effect::ForwardHead(add)) = run.effects.iter().find(|effect| matches!(effect, Effect::ForwardHead(_)))
        else {
            panic!("{:?}", run.effects)
        };
        assert_eq!(add["routing-strategy"], "power-of-two:2,prefix-cache");
        run.oracle();
    }
}

#[test]
fn filters_choose_among_pods_or_say_why_not() {
    let world = world_with(&plain(), |_| {});
    for (lines, hosts) in [
        (vec![&b"zone=b"[..]], vec![2]),
        (vec![b" zone in (a, b) , !missing "], vec![0, 1, 2]),
        (vec![b"zone in (a,b)", b"zone!=a"], vec![2]),
        (vec![b"!zone"], vec![3]),
        (vec![b""], vec![0, 1, 2, 3]),
        (vec![b"", b"zone", b" "], vec![0, 1, 2]),
    ] {
        for strategy in ["random", "least-request", "throughput,least-kv-cache"] {
            let mut pairs = vec![("routing-strategy", strategy.as_bytes())];
            pairs.extend(lines.iter().map(|line| ("external-filter", *line)));
            let run = send(&world, &pairs);
            let target = target(&run);
            assert!(hosts.iter().any(|host| target == format!("10.0.0.{host}:8000")), "{lines:?}: {target}");
            drop(run);
        }
    }
    let long = "k=v,".repeat(2000);
    for bad in [&b"zone="[..5], b"=a", b"zone in ()", b"zone=a,", b"zone=\xff", b"a b", long.as_bytes()] {
        let run = send(&world, &[("routing-strategy", b"random"), ("external-filter", bad)]);
        if bad == b"zone=" {
            assert_eq!(run.refusal().reason, Reason::SelectionFailed, "an empty value is a value, which nobody has");
            continue;
        }
        let error = run.refusal();
        assert_eq!((error.status.as_u16(), error.reason), (400, Reason::BadFilter));
        assert_eq!(error.headers()["x-error-routing"], "true");
        assert!(error.message.starts_with("external-filter is not a label selector: "), "{}", error.message);
        run.oracle();
    }
    for strategy in ["random", "pd", "prefix-cache,random"] {
        let pairs = [("routing-strategy", strategy.as_bytes()), ("external-filter", b"zone=nowhere")];
        let run = send(&world, &pairs);
        let error = run.refusal();
        assert_eq!((error.status.as_u16(), error.reason), (503, Reason::SelectionFailed), "{strategy}");
        assert!(error.message.ends_with("external-filter matches none of 4 ready pods"), "{}", error.message);
        run.oracle();
    }
    // Without a strategy there is no choice to steer.
    assert!(send(&world, &[("external-filter", b"=nonsense")]).names().contains(&"route"));
}

/// A fleet in which two engines run: `pd` is possible for those that the filter leaves.
#[test]
fn filters_come_before_the_check_of_engines() {
    let mut specs = pair();
    for pod in &mut specs {
        pod.labels = Arc::new(BTreeMap::from([("pool".to_owned(), "new".to_owned())]));
    }
    specs.push(PodSpec { engine: Engine::Sglang, ..spec("old", Role::Decode, Some("old")) });
    let world = world_with(&specs, |_| {});
    let pd = ("routing-strategy", &b"pd"[..]);
    let run = send(&world, &[pd]);
    assert!(run.refusal().message.contains("different engines"));
    run.oracle();
    let mut run = send(&world, &[pd, ("external-filter", b"pool=new")]);
    assert_eq!(run.names(), ["accept", "extend", "prefill"]);
    run.feed(Event::Gone);
    run.oracle();
    let run = send(&world, &[pd, ("external-filter", b"!pool")]);
    assert_eq!(run.refusal().reason, Reason::SelectionFailed, "the other engine has no complete roleset");
    run.oracle();
}

#[test]
fn sessions_stay_and_forged_ones_go_nowhere() {
    let world = world_with(&plain(), |_| {});
    let answered = |pairs: &[(&'static str, &[u8])]| {
        let mut run = send(&world, pairs);
        let target = target(&run);
        run.feed(answer_head(200)).feed(chunk("{}", true));
        let issued = run.effects.iter().find_map(|effect| match effect {
            Effect::ForwardHead(add) => add.get("x-session-id").map(|id| id.to_str().unwrap().to_owned()),
            _ => None,
        });
        run.oracle();
        (target, issued)
    };
    for strategy in ["session-affinity", "session-affinity:3,random"] {
        let strategy = ("routing-strategy", strategy.as_bytes());
        for number in 0..4 {
            let address = format!("10.0.0.{number}:8000");
            let id = crate::exchange::session::session_id(&address);
            let answer = answered(&[strategy, ("x-session-id", id.as_bytes())]);
            assert_eq!(answer, (address, Some(id)));
        }
        for forged in ["169.254.169.254:80", "10.0.0.1:22", "localhost:8000", "10.0.0.1:8000@evil"] {
            let id = crate::exchange::session::session_id(forged);
            let (target, issued) = answered(&[strategy, ("x-session-id", id.as_bytes())]);
            assert!(plain().iter().any(|pod| pod.address() == target), "{target}");
            assert_eq!(issued, Some(crate::exchange::session::session_id(&target)), "a good one is issued");
        }
        let by_key = answered(&[strategy, ("x-aibrix-session-key", b"chat-7")]);
        for _ in 0..5 {
            assert_eq!(answered(&[strategy, ("x-aibrix-session-key", b"chat-7")]), by_key);
        }
    }
    let id = crate::exchange::session::session_id("10.0.0.1:8000");
    let (_, issued) = answered(&[("routing-strategy", b"least-request"), ("x-session-id", id.as_bytes())]);
    assert_eq!(issued, None, "other strategies keep no sessions");
}

/// The strategy `prefix-cache` hashes the prompt, finds who holds it, and tells the index whom it chose.
#[test]
fn prefix_cache_looks_up_and_tells() {
    const LONG: &str = r#"{"model":"m","prompt":"0123456789abcdef0123456789abcdef0123456789abcdef","max_tokens":8}"#;
    let world = world_with(&plain(), |knobs| knobs.prefix.block_size = 4);
    let ask = |strategy: &'static str| {
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head(&[("routing-strategy", strategy)])).feed(body(LONG));
        let target = target(&run);
        run.feed(answer_head(200)).feed(chunk("{}", true));
        run.oracle();
        world.prefix.drain(Tick::from_millis(1));
        target
    };
    ask("least-request");
    assert_eq!(world.prefix.stats().entries, 0, "nobody else tells the index");
    let first = ask("prefix-cache");
    assert!(world.prefix.stats().entries > 0);
    for strategy in ["prefix-cache", "prefix-cache,least-request", "prefix-cache"] {
        for _ in 0..5 {
            assert_eq!(ask(strategy), first, "{strategy}");
        }
    }
}

/// R43: what a strategy could not see is counted, by signal.
#[test]
fn r43_missing_signals_are_counted() {
    let world = world_with(&plain(), |_| {});
    for strategy in ["throughput", "least-latency", "least-kv-cache", "least-request"] {
        drop(send(&world, &[("routing-strategy", strategy.as_bytes())]));
    }
    let text = world.metrics.render(&FleetGauges::default(), Tick::from_millis(1));
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("tandem_routing_signal_missing_total{")).collect();
    let count = |signal: &str| lines.iter().find(|line| line.contains(signal)).and_then(|line| line.split(' ').nth(1));
    assert_eq!(count("avg_generation_throughput_toks_per_s"), Some("2"), "{lines:?}");
    assert_eq!(count("request_prefill_time_seconds"), Some("1"), "{lines:?}");
    assert_eq!(count("kv_cache_usage_perc"), Some("1"), "{lines:?}");
    assert_eq!(lines.len(), 3);
    assert!(lines.iter().all(|line| line.contains("model=\"m\"")));
}

/// What an answer's head gets, after one request.
fn answered(world: &Arc<World>, pairs: &[(&'static str, &[u8])]) -> HeaderMap {
    let mut run = send(world, pairs);
    run.feed(answer_head(200)).feed(chunk("{}", true));
    let added = run.effects.iter().find_map(|effect| match effect {
        Effect::ForwardHead(add) => Some(add.clone()),
        _ => None,
    });
    assert!(added.is_some(), "{:?}", run.effects);
    run.oracle();
    added.unwrap()
}

/// A name that another strategy serves, and a list whose other members do not count: the answer says so.
#[test]
fn what_is_served_otherwise_says_so() {
    let world = world_with(&plain(), |_| {});
    for entry in crate::knobs::REGISTERED.iter().filter(|entry| entry.name != "pd") {
        let head = answered(&world, &[("routing-strategy", entry.name.as_bytes())]);
        assert_eq!(head["routing-strategy"], entry.served_as);
        let note = head.get("x-tandem-strategy-note").map(|note| note.to_str().unwrap());
        let expected = format!("{} is served as {}: ", entry.name, entry.served_as);
        assert_eq!(note.is_some_and(|note| note.starts_with(&expected)), entry.name != entry.served_as, "{note:?}");
    }
}

/// `vtc-basic`: users have places of their own, and tokens move them.
#[test]
fn users_have_places() {
    let world = world_with(&plain(), |knobs| {
        let pd = Arc::make_mut(&mut knobs.pd);
        pd.strategies.vtc.min_tokens = 10.0;
    });
    let ask = |user: &'static str| {
        let mut run = send(&world, &[("routing-strategy", b"vtc-basic"), ("user", user.as_bytes())]);
        let target = target(&run);
        run.feed(answer_head(200)).feed(chunk("{}", true));
        run.oracle();
        target
    };
    // The first is at the first pod; what it was given, by the table's only count, makes it the measure of all.
    assert_eq!(ask("alice"), "10.0.0.0:8000");
    assert_eq!(ask("alice"), "10.0.0.1:8000", "one step of (its own + its own) / 2");
    assert_eq!(ask("bob"), "10.0.0.0:8000");
    assert_eq!(world.users.len(), 2);
    let strategies = &world.knobs.pd.strategies;
    let number = crate::load::Users::number(b"alice", world.hash_seed.get()).unwrap();
    let body = BODY.len() as u64 / 4;
    let each = crate::routing::weighted_tokens(body, &strategies.vtc);
    assert_eq!(world.users.look(number, Tick::from_millis(1), &strategies.vtc).tokens, each * 2.0);
    // Without a user, or with a strategy that counts none, nothing is counted.
    drop(send(&world, &[("routing-strategy", b"vtc-basic")]));
    drop(send(&world, &[("routing-strategy", b"random"), ("user", b"carol")]));
    assert_eq!(world.users.len(), 2);
}

/// What `prefix-cache-preble` has sent to a pod counts there, and the index is told.
#[test]
fn preble_counts_what_it_sends() {
    const LONG: &str = r#"{"model":"m","prompt":"0123456789abcdef0123456789abcdef0123456789abcdef","max_tokens":8}"#;
    let world = world_with(&plain(), |knobs| knobs.prefix.block_size = 4);
    let mut seen = std::collections::BTreeSet::new();
    let ask = |text: String| {
        let mut run = Run::new(Arc::clone(&world));
        run.feed(head(&[("routing-strategy", "prefix-cache-preble")])).feed(sent(text));
        let target = target(&run);
        run.feed(answer_head(200)).feed(chunk("{}", true));
        run.oracle();
        world.prefix.drain(Tick::from_millis(1));
        target
    };
    // Four prompts that have nothing in common: each goes where nothing was sent yet.
    for letter in ["a", "b", "c", "d"] {
        seen.insert(ask(LONG.replace("0123456789abcdef", &letter.repeat(16))));
    }
    assert_eq!(seen.len(), 4);
    let first = ask(LONG.to_owned());
    for _ in 0..3 {
        assert_eq!(ask(LONG.to_owned()), first, "where the prompt is");
    }
}

/// The model's configuration may say that requests do not choose.
#[test]
fn requests_can_be_kept_from_choosing() {
    let config = r#"{"disableRequestRoutingOverrides": true, "profiles": {
        "default": {"routingStrategy": "least-request"}, "other": {"routingStrategy": "random"}}}"#;
    let world = world_with(&configured(config), |_| {});
    let headers: &[(&'static str, &[u8])] =
        &[("routing-strategy", b"no such"), ("config-profile", b"other"), ("external-filter", b"=nonsense")];
    assert_eq!(answered(&world, headers)["routing-strategy"], "least-request");
}

/// A limit per pod: enforced where no strategy is named as well, given back at the end, and told by a code of its own.
#[test]
fn requests_in_flight_are_limited_per_pod() {
    let config = r#"{"profiles": {"default": {"requestsInflight": 2}, "free": {"routingStrategy": "random"}}}"#;
    let world = world_with(&configured(config), |_| {});
    let held: Vec<Run> = (0..8).map(|_| send(&world, &[])).collect();
    let mut per_pod = BTreeMap::<String, usize>::new();
    for run in &held {
        *per_pod.entry(target(run)).or_default() += 1;
    }
    assert!(per_pod.values().all(|count| *count == 2), "{per_pod:?}");
    let run = send(&world, &[]);
    let error = run.refusal();
    assert_eq!((error.status.as_u16(), error.reason), (429, Reason::PodsSaturated));
    assert_eq!(error.headers()["x-error-model-replica-inflight-exceeded"], "true");
    assert_eq!(error.headers()["retry-after"], "1");
    let object: serde_json::Value = serde_json::from_slice(&error.body()).unwrap();
    assert_eq!(object["error"]["code"], "replica_inflight_exceeded");
    assert_eq!(object["error"]["type"], "overloaded_error");
    assert!(target(&send(&world, &[("config-profile", b"free")])).starts_with("10.0.0."));
    let mut held = held;
    let freed = target(&held[3]);
    held.remove(3).feed(Event::Gone);
    assert_eq!(target(&send(&world, &[])), freed);
}

#[test]
fn a_profile_has_its_own_idea_of_a_slow_first_token() {
    let config = r#"{"profiles": {"default": {"routingStrategy": "random"},
                                  "patient": {"routingStrategy": "random", "ttftThresholdS": 3}}}"#;
    let world = world_with(&configured(config), |_| {});
    for (profile, slow) in [("default", 1), ("patient", 1), ("patient", 2)] {
        let mut run = send(&world, &[("config-profile", profile.as_bytes())]);
        run.feed(answer_head(200));
        run.now += if slow == 2 { 3500 } else { 1500 };
        run.feed(chunk("{}", true));
        world.metrics.finish(run.record(), None);
        run.oracle();
    }
    let text = world.metrics.render(&FleetGauges::default(), Tick::from_millis(1));
    let line = text.lines().find(|line| line.starts_with("gateway_first_token_delay_over_1s_total{")).unwrap();
    assert!(line.ends_with(" 2"), "the default's one, and the patient one's second: {line}");
}

/// Engines with paths of their own get the request there.
#[test]
fn xdit_is_asked_under_its_own_path() {
    for (engine, path, expected) in [
        ("xdit", "/v1/images/generations", Some("/generate")),
        ("xdit", "/v1/video/generations", Some("/generatevideo")),
        ("xllm", "/v1/images/generations", None),
    ] {
        let label = BTreeMap::from([("model.aibrix.ai/engine".to_owned(), engine.to_owned())]);
        let specs: Vec<_> = plain()
            .into_iter()
            .map(|pod| PodSpec { engine: Engine::Other, labels: Arc::new(label.clone()), ..pod })
            .collect();
        let world = world_with(&specs, |_| {});
        for strategy in [Some("random"), None] {
            let Event::Head(mut request) = head(&[]) else { panic!() };
            request.path = path.to_owned();
            if let Some(name) = strategy {
                request.headers.insert("routing-strategy", HeaderValue::from_static(name));
            }
            let mut run = Run::new(Arc::clone(&world));
            run.feed(Event::Head(request)).feed(body(BODY));
            let Some(Effect::Route(plan)) = run.effects.iter().find(|effect| matches!(effect, Effect::Route(_))) else {
                panic!("{:?}", run.effects)
            };
            assert_eq!(plan.path, expected.unwrap_or(path));
            let set = plan.set_headers.iter().find(|(name, _)| *name == ":path").map(|(_, path)| path.as_str());
            assert_eq!(set, expected);
        }
    }
}
