//! What is none of the gateway's business goes by.

use super::*;
use crate::knobs::Secret;

const FORGED: &[(&str, &str)] = &[
    ("target-pod", "10.9.9.9:80"),
    ("x-override-rid", "r"),
    ("model", "m"),
    ("accept-encoding", "gzip"),
    ("routing-strategy", "pd"),
];

#[test]
fn requests_without_a_body_pass_whatever_their_path() {
    for (path, method) in [
        ("/v1/models", Method::GET),
        ("/healthz", Method::GET),
        ("/metrics", Method::HEAD),
        ("/v1/files/file-1/content?x=1", Method::GET),
        ("/v1/files/file-1", Method::DELETE),
        ("/v1/batches/batch-1/cancel", Method::POST),
        ("/v1/chat/completions", Method::GET),
        ("/v1/chat/completions", Method::OPTIONS),
        ("*", Method::OPTIONS),
    ] {
        let mut run = Run::new(world());
        run.feed(head_of(path, method.clone(), FORGED, true));
        assert_eq!(run.names(), ["pass", "end"], "{method} {path}");
        let Some(Effect::Pass { remove }) = run.effects.first() else { panic!() };
        let mut remove: Vec<&str> = remove.iter().map(String::as_str).collect();
        remove.sort_unstable();
        assert_eq!(remove, ["model", "target-pod", "x-override-rid"], "only what would mislead Envoy or an engine");
        assert_eq!(run.record().outcome, Outcome::Passed);
        run.oracle();
    }
}

#[test]
fn what_passes_is_no_request_to_a_model() {
    let mut run = Run::new(world());
    run.feed(head_of("/v1/models", Method::GET, &[], true));
    let world = Arc::clone(&run.world);
    world.metrics.finish(run.record(), None);
    let page = world.metrics.render(&crate::telemetry::FleetGauges::default(), Tick::from_millis(0));
    assert!(!page.lines().any(|line| line.starts_with("gateway_request_")), "{page}");
    run.oracle();
}

#[test]
fn what_passes_shows_the_token_too() {
    for (given, names) in [
        (&[][..], &["refuse", "end"]),
        (&[("authorization", "Bearer x")], &["refuse", "end"]),
        (&[("authorization", "Bearer k")], &["pass", "end"]),
    ] {
        let mut run = Run::new(world_with(&pair(), |knobs| knobs.auth_bearer_token = Some(Secret::new("k"))));
        run.feed(head_of("/v1/models", Method::GET, given, true));
        assert_eq!(run.names(), names, "{given:?}");
        run.oracle();
    }
}

/// Nobody is behind the front that could answer it.
#[test]
fn the_front_passes_nothing() {
    for (path, method, status) in
        [("/v1/files", Method::GET, 501), ("/v1/completions", Method::GET, 405), ("/v1/completions", Method::POST, 400)]
    {
        let mut run = Run::over(world(), Adapter::Front);
        run.feed(head_of(path, method, &[], true));
        assert_eq!(run.refusal().status.as_u16(), status, "{path}");
        run.oracle();
    }
}
