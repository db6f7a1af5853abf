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
        "vtc-basic",
        "slo",
        "pd:1",
        "pd,random",
        "random,pd:0",
        "random,",
        "random,,throughput",
        "random:",
        "random:-1",
        "random:1.5",
        "random:NaN",
        "random:1000001",
        "random:0",
        "random:0,throughput:0",
        "random,random:2",
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
    let by_lock = world_with(&configured(r#"{"lockedRoutingStrategy": "pd,random"}"#), |_| {});
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
