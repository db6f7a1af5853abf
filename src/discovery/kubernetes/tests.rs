use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::backoff::Backoff;
use super::outage::{ApiServer, Outage};
use super::page::PageSize;
use super::status::WatchFailure;
use super::store::Store;
use super::wire::{Entry, Event, ObjectKey, Objects, Refusal, read_line, read_page};
use super::{AdapterObject, PodObject, RouteObject, Watched, Word};
use crate::clock::Tick;
use crate::discovery::{PodReader, read_documents};
use crate::rng::Rng;

fn key(name: &str) -> ObjectKey {
    ObjectKey { namespace: Arc::from("ns"), name: Arc::from(name) }
}

fn pod(name: &str) -> Value {
    json!({
        "metadata": {
            "name": name, "namespace": "ns", "uid": "u1", "resourceVersion": "7",
            "labels": {"model.aibrix.ai/name": "m"},
        },
        "status": {"podIP": "10.0.0.1"},
    })
}

#[test]
fn lines_of_a_watch() {
    let line = |kind: &str, object: &Value| {
        read_line::<PodObject>(json!({"type": kind, "object": object}).to_string().as_bytes())
    };
    let uid: Box<str> = "u1".into();
    let there = PodObject::read(&pod("a").to_string()).unwrap();
    assert!(there.is_some());
    for kind in ["ADDED", "MODIFIED"] {
        let (event, version) = line(kind, &pod("a"));
        assert_eq!(event, Event::There(key("a"), uid.clone(), there.clone()), "{kind}");
        assert_eq!(version.as_deref(), Some("7"));
    }
    assert_eq!(line("DELETED", &pod("a")), (Event::Gone(key("a"), uid.clone()), Some("7".to_owned())));
    let mut foreign = pod("a");
    foreign["metadata"]["labels"] = json!({"app": "other"});
    assert_eq!(line("MODIFIED", &foreign).0, Event::There(key("a"), uid, None));
    let bookmark = json!({"kind": "Pod", "metadata": {"resourceVersion": "9", "creationTimestamp": null}});
    assert_eq!(line("BOOKMARK", &bookmark), (Event::Bookmark, Some("9".to_owned())));
    let expired = json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too\nold"});
    let (event, version) = line("ERROR", &expired);
    assert_eq!(version, None);
    let Event::Error(refusal) = event else { panic!("{event:?}") };
    assert_eq!((refusal.code, refusal.to_string().as_str()), (410, "410 Expired: too old"));

    // What cannot be read is no event, but its version counts where it is there.
    let mut odd = pod("a");
    odd["status"]["podIP"] = 7.into();
    assert_eq!(line("MODIFIED", &odd), (Event::Unreadable, Some("7".to_owned())));
    assert_eq!(line("INVENTED", &pod("a")).0, Event::Unreadable);
    assert_eq!(line("ADDED", &json!({})), (Event::Unreadable, None));
    for text in ["", "{", "[]", "null", "\u{feff}{}", r#"{"type":"ADDED"}"#] {
        assert_eq!(read_line::<PodObject>(text.as_bytes()), (Event::Unreadable, None), "{text:?}");
    }
}

#[test]
fn pages_of_a_list() {
    let mut objects = Objects::<PodObject>::new();
    let mut foreign = pod("b");
    foreign["metadata"]["labels"] = Value::Null;
    let list = json!({
        "metadata": {"resourceVersion": "12", "continue": "token"},
        "items": [pod("a"), foreign, {"metadata": 3}, pod("c")],
    });
    let page = read_page(list.to_string().as_bytes(), &mut objects).unwrap();
    assert_eq!((page.version.as_str(), page.next.as_deref(), page.unreadable), ("12", Some("token"), 1));
    assert_eq!(objects.keys().map(|key| &*key.name).collect::<Vec<_>>(), ["a", "c"]);
    for (text, next) in [
        (r#"{"metadata": {"resourceVersion": "1", "continue": ""}, "items": null}"#, None),
        (r#"{"metadata": {"resourceVersion": "1"}}"#, None),
    ] {
        assert_eq!(read_page(text.as_bytes(), &mut objects).unwrap().next.as_deref(), next, "{text}");
    }
    for text in ["", "<html>", r#"{"items": 3}"#] {
        assert!(read_page(text.as_bytes(), &mut objects).is_err(), "{text}");
    }
}

#[test]
fn refusals_are_bounded_and_on_one_line() {
    let forbidden = json!({"reason": "Forbidden", "message": format!("a\nb{}", "x".repeat(5000)), "code": 403});
    let text = Refusal::read(403, forbidden.to_string().as_bytes()).to_string();
    assert!(text.starts_with("403 Forbidden: a bxxx") && text.ends_with("...") && text.len() < 400, "{text}");
    assert_eq!(Refusal::read(502, b"<html>secret</html>").to_string(), "502");
    assert_eq!(
        Refusal::read(401, br#"{"reason":"Unauthorized","message":"Unauthorized"}"#).to_string(),
        "401 Unauthorized"
    );
    let busy = Refusal::read(429, br#"{"details":{"retryAfterSeconds":3}}"#);
    assert_eq!((busy.code, busy.retry_after_s), (429, 3));
}

/// What is kept of a pod reads as the whole pod does, and is small.
#[test]
fn a_reduced_pod_reads_like_the_whole_one() {
    let config = r#"{"profiles": {"default": {"routingStrategy": "pd"}}}"#;
    let long = "x".repeat(200_000);
    let mut whole = json!({
        "kind": "Pod",
        "metadata": {
            "name": "a", "namespace": "ns", "uid": "u", "deletionTimestamp": "2026-01-01T00:00:00Z",
            "labels": {
                "model.aibrix.ai/name": "m", "model.aibrix.ai/port": "81", "model.aibrix.ai/metric-port": "82",
                "model.aibrix.ai/engine": "sglang", "model.aibrix.ai/kv-connector-type": "nixl", "role-name": "prefill",
                "roleset-name": "r", "stormservice.orchestration.aibrix.ai/pod-group-index": "1",
                "stormservice.orchestration.aibrix.ai/role-replica-index": "2", "zone": "z",
            },
            "annotations": {
                "model.aibrix.ai/config": config, "model.aibrix.ai/sglang-bootstrap-port": "83",
                "kubectl.kubernetes.io/last-applied-configuration": long, "aibrix.ai/draining": "true",
                "kubectl.kubernetes.io/default-container": "b", "model.aibrix.ai/scheme": "https",
            },
            "managedFields": [{"manager": "kubelet"}],
        },
        "spec": {"containers": [
            {"name": "a", "ports": [{"containerPort": 81}, {"containerPort": 9}], "env": [
                {"name": "TOKEN", "value": "hunter2"}, {"name": "data-parallel-size", "value": ""},
                {"name": "data-parallel-size", "value": "3"}, {"name": "NODE", "valueFrom": {"fieldRef": {}}},
            ]},
            {"name": "b", "ports": [{"containerPort": 83}], "command": [long]}, {"name": long},
        ]},
        "status": {
            "phase": "Running", "podIP": "10.0.0.1", "hostIP": "10.1.1.1",
            "conditions": [
                {"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True", "message": long},
            ],
            "containerStatuses": [{"restartCount": 2, "name": "a"}, {"restartCount": 3, "name": "b"}],
        },
    });
    let check = |whole: &Value| {
        let text = whole.to_string();
        let reduced = PodObject::read(&text).unwrap().expect("it names a model");
        let shown = format!("{reduced:?}");
        assert!(shown.len() < 2500 && !shown.contains("hunter2"), "{} bytes", shown.len());
        let read = |manifest| PodReader::new(Arc::default()).read(manifest);
        assert_eq!(read(&reduced.0), read(&read_documents(&text).pods[0]), "{text}");
    };
    check(&whole);
    let odd = "9".repeat(40);
    for size in ["2", "64", "65", "x", "-1", "70000", "00000000000000000000000000000000000002", &odd] {
        whole["spec"]["containers"][0]["env"][2]["value"] = size.into();
        check(&whole);
    }
    // Ports that no container declares: the annotation decides, then the order.
    whole["metadata"]["labels"]["model.aibrix.ai/port"] = "700".into();
    check(&whole);
    whole["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] = Value::Null;
    check(&whole);
    whole["metadata"]["labels"]["model.aibrix.ai/port"] = "81".into();
    let conditions = [json!(null), json!([]), json!([{"type": "Initialized", "status": "True"}])];
    for (condition, phase) in conditions.into_iter().zip(["Failed", "Succeeded", "Pending"]) {
        whole["status"]["conditions"] = condition;
        whole["status"]["phase"] = phase.into();
        check(&whole);
    }
    whole["metadata"]["deletionTimestamp"] = Value::Null;
    whole["status"] = Value::Null;
    check(&whole);

    // Labels without end: those that the gateway reads stay.
    for number in 0..5000 {
        whole["metadata"]["labels"][format!("a{number}")] = "x".into();
    }
    let kept = PodObject::read(&whole.to_string()).unwrap().unwrap();
    let spec = PodReader::new(Arc::default()).read(&kept.0).spec.unwrap();
    assert_eq!((&*spec.model, spec.port, spec.roleset.as_deref()), ("m", 81, Some("r")));
    assert!(spec.labels.len() <= 256 + 10, "{}", spec.labels.len());
}

#[test]
fn which_pods_are_the_gateways_business() {
    for (labels, annotations, wanted) in [
        (json!({"model.aibrix.ai/name": "m"}), json!({}), true),
        (json!({}), json!({"model.aibrix.ai/name": "m"}), true),
        (json!({}), json!({"modelclaim.aibrix.ai/x": "{}"}), true),
        (json!({"app": "m"}), json!({"model.aibrix.ai/config": "{}"}), false),
        (json!(null), json!(null), false),
    ] {
        let pod = json!({"metadata": {"name": "a", "labels": labels, "annotations": annotations}});
        assert_eq!(PodObject::read(&pod.to_string()).unwrap().is_some(), wanted, "{pod}");
    }
}

#[test]
fn adapters_and_routes_are_bounded() {
    let many: Vec<String> = (0..10_000).map(|number| format!("p{number}")).collect();
    let mut instances = many.clone();
    instances[3] = "x".repeat(254);
    let adapter = json!({
        "metadata": {"name": "l", "namespace": "ns"}, "status": {"instances": instances, "phase": "Running"},
    });
    let adapter = AdapterObject::read(&adapter.to_string()).unwrap().unwrap();
    assert_eq!(adapter.instances.len(), super::MAX_LISTED - 1);
    for bare in [json!({"metadata": {"name": "l"}}), json!({"metadata": {"name": "l"}, "status": null})] {
        assert_eq!(AdapterObject::read(&bare.to_string()).unwrap().unwrap().instances, [""; 0]);
        assert_eq!(RouteObject::read(&bare.to_string()).unwrap().unwrap().parents, []);
    }
    let condition = json!({"type": "Accepted", "status": "é".repeat(300)});
    let parent = json!({"controllerName": "c", "conditions": vec![condition; 100]});
    let route = json!({"metadata": {"name": "r", "namespace": "ns"}, "status": {"parents": vec![parent; 5000]}});
    let route = RouteObject::read(&route.to_string()).unwrap().unwrap();
    assert_eq!((route.parents.len(), route.parents[0].conditions.len()), (super::MAX_LISTED, 32));
    assert_eq!(route.parents[0].conditions[0].status.len(), 252);
}

#[test]
fn waits_double_with_chance_and_bounds() {
    let max = Duration::from_secs(10);
    let mut rng = Rng::new(1);
    let mut backoff = Backoff::new(Duration::from_millis(200));
    for due in [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000].map(Duration::from_millis) {
        let wait = backoff.next(max, Duration::ZERO, &mut rng);
        assert!(wait >= due / 2 && wait <= due, "{wait:?} of {due:?}");
    }
    for _ in 0..100 {
        assert!(backoff.next(max, Duration::ZERO, &mut rng) <= max);
    }
    backoff.reset();
    assert_eq!(backoff.failures(), 0);
    assert!(backoff.next(max, Duration::ZERO, &mut rng) <= Duration::from_millis(200));
    assert!(backoff.next(max, Duration::from_secs(4), &mut rng) >= Duration::from_secs(4), "it was asked to");
    assert_eq!(backoff.next(max, Duration::from_hours(1), &mut rng), max, "but not for ever");
}

#[test]
fn a_store_is_known_in_full_or_not_at_all() {
    let entry = |object: u8| Entry { uid: "u".into(), object: Arc::new(object) };
    let all = |store: &Store<u8>| store.all().map(|all| all.iter().map(|object| **object).collect::<Vec<_>>());
    let available = |store: &Store<u8>| store.available().map(|all| all.len());
    let store = Store::<u8>::new(2);
    let mut changes = store.subscribe();
    let mut changed = || changes.has_changed().unwrap() && *changes.borrow_and_update() > 0;
    store.put(0, key("early"), "u".into(), 9);
    assert!(!changed() && store.is_empty(), "events before the list are none");
    store.replace(0, Objects::from([(key("a"), entry(1))]));
    assert!(changed());
    assert_eq!((all(&store), available(&store)), (None, None));
    store.unavailable(1);
    assert!(changed());
    assert_eq!((all(&store), available(&store)), (None, Some(1)));
    store.replace(1, Objects::new());
    assert!(changed());
    assert_eq!(all(&store), Some(vec![1]));
    // What is known stays when it cannot be listed any more.
    store.unavailable(0);
    assert!(!changed());
    assert_eq!(all(&store), Some(vec![1]));

    store.put(0, key("a"), "u".into(), 1);
    assert!(!changed(), "the same again");
    store.put(0, key("a"), "v".into(), 1);
    assert!(changed(), "the same under another UID");
    store.remove(0, &key("a"), "u");
    assert!(!changed(), "the end of an earlier one");
    store.remove(1, &key("a"), "v");
    assert!(!changed(), "in another namespace");
    store.remove(0, &key("a"), "v");
    assert!(changed());
    assert_eq!(all(&store), Some(vec![]));
    store.forget(0);
    assert!(changed());
    assert_eq!((all(&store), available(&store)), (None, Some(0)));
    store.forget(0);
    assert!(!changed());
    store.replace(7, Objects::new());
    assert!(!changed(), "no such scope");
}

#[test]
fn words_name_verb_resource_group_and_place() {
    let refused = |code| super::ApiError::Refused(Refusal { code, reason: "No".into(), ..Refusal::default() });
    let pods = super::FeedStatus::new::<PodObject>(Some(Arc::from("ns")));
    let now = Tick::from_millis(10_000);
    assert_eq!(pods.word(now), Some(Word::Reason("the first list of pods in namespace ns is not complete".into())));
    assert!(pods.list_failed(refused(403)) && !pods.list_failed(refused(403)), "told once");
    let cannot = "cannot list pods (API group core) in namespace ns: the API server says 403 No";
    assert_eq!(pods.word(now), Some(Word::Reason(cannot.into())));
    pods.hear(Tick::from_millis(7_000));
    pods.listed(0);
    assert_eq!(pods.word(now), None);
    pods.list_failed(refused(403));
    assert_eq!(pods.word(now), Some(Word::Note(format!("{cannot}; serving on what was known 3 s ago"))));
    pods.listed(2);
    assert_eq!(pods.word(now), Some(Word::Note("2 of the pods cannot be read".into())));
    assert_eq!(pods.age(now), Some(Duration::from_secs(3)));

    let adapters = super::FeedStatus::new::<AdapterObject>(None);
    assert_eq!((adapters.word(now), adapters.age(now)), (None, None), "nobody waits for them");
    assert!(adapters.absent() && !adapters.absent());
    assert_eq!(adapters.word(now), None);
    adapters.watch_failed(WatchFailure::Error("late".into()));
    let note = "cannot watch modeladapters (API group model.aibrix.ai) in all namespaces: late; the gateway serves without them";
    assert_eq!(adapters.word(now), Some(Word::Note(note.into())));
    adapters.opened();
    assert_eq!(adapters.word(now), None, "one is open");
    // That it opens is no news where it always ends at once.
    assert!(adapters.watch_failed(WatchFailure::Early));
    adapters.opened();
    assert!(!adapters.watch_failed(WatchFailure::Early) && adapters.word(now).is_some());
    adapters.watched();
    assert_eq!(adapters.word(now), None);
    // What was listed is in force while it cannot be listed again, and no longer when the kind is gone.
    adapters.hear(now);
    adapters.listed(0);
    adapters.list_failed(refused(403));
    let Some(Word::Note(text)) = adapters.word(now) else { panic!("a note") };
    assert!(text.ends_with("; serving on what was known 0 s ago"), "{text}");
    assert!(adapters.absent());
    adapters.list_failed(refused(403));
    let Some(Word::Note(text)) = adapters.word(now) else { panic!("a note") };
    assert!(text.ends_with("; the gateway serves without them"), "{text}");
}

#[test]
fn pages_shrink_to_one_object_and_grow_with_speed() {
    let answer = Duration::from_secs(8);
    let mut page = PageSize::default();
    let mut sizes = vec![page.limit()];
    while page.shrink() {
        sizes.push(page.limit());
    }
    assert_eq!(sizes, [500, 125, 31, 7, 1]);
    page.came(Duration::from_secs(1), answer);
    assert_eq!(page.limit(), 1, "not quickly");
    for expected in [2, 4, 8, 16, 32, 64, 128, 256, 500, 500] {
        page.came(Duration::from_millis(999), answer);
        assert_eq!(page.limit(), expected);
    }
}

#[test]
fn an_outage_ends_with_the_last_watch_that_is_in_it() {
    let now = Tick::from_millis(1);
    let server = Arc::new(ApiServer::default());
    let [mut a, mut b] = [(); 2].map(|()| Outage::new(Arc::clone(&server)));
    a.over("watch", now);
    assert_eq!(server.watches_without(), 0, "none to end");
    a.began("watch", "", now);
    a.began("list", "", now);
    b.began("watch", "", now);
    assert_eq!(server.watches_without(), 2);
    a.over("list", now);
    assert_eq!(server.watches_without(), 1);
    b.over("list", now);
    assert_eq!(server.watches_without(), 1, "it cannot watch");
    b.over("watch", now);
    b.over("watch", now);
    assert_eq!(server.watches_without(), 0);
}
