//! Scenes of strategies other than `pd`: pods that run everything.

use super::scene::{Given, Member, Scene, decode_pod, prompt};
use super::*;
use crate::fleet::{Adapters, Signals};
use crate::load::Users;

const THREE: &[Member] = &[("a", Role::Other, None, ""), ("b", Role::Other, None, ""), ("c", Role::Other, None, "")];

fn usage(kv_usage: f64) -> Signals {
    Signals { kv_usage: Some(kv_usage), ..Signals::unknown() }
}

/// `a` has the emptiest cache and so many requests.
fn emptiest_with(given: &Given<'_>, [a, b, c]: [usize; 3]) -> String {
    let scene = Scene::new(given, THREE);
    let scene = scene.decodes("a", a, &usage(0.0)).decodes("b", b, &usage(0.3)).decodes("c", c, &usage(0.6));
    decode_pod(&scene.ask_with(&[("routing-strategy", "least-kv-cache")], "hello"))
}

pub(super) fn emptiest_with_four(given: &Given<'_>) -> String {
    emptiest_with(given, [4, 0, 1])
}

/// 12 requests, twice as many as the others have in the mean, and one more.
pub(super) fn emptiest_with_twelve(given: &Given<'_>) -> String {
    emptiest_with(given, [12, 7, 3])
}

const VTC: &[(&str, &str)] = &[("routing-strategy", "vtc-basic"), ("user", "alice")];

/// The first pod, where a new user belongs, has eight requests.
pub(super) fn new_user_at_a_busy_pod(given: &Given<'_>) -> String {
    let scene = Scene::new(given, THREE).decodes("a", 8, &usage(0.0));
    decode_pod(&scene.ask_with(VTC, "hello"))
}

/// The same, when it does not matter which of the idle pods it is.
pub(super) fn away_from_a_busy_pod(given: &Given<'_>) -> String {
    let pod = new_user_at_a_busy_pod(given);
    if pod == "a" { pod } else { "another".to_owned() }
}

pub(super) fn second_request_of_a_user(given: &Given<'_>) -> String {
    let scene = Scene::new(given, THREE);
    drop(scene.ask_with(VTC, "hello"));
    decode_pod(&scene.ask_with(VTC, "hello"))
}

/// What a request of 30 bytes, 7 tokens, counts for its user after so many seconds.
fn tokens_after(given: &Given<'_>, seconds: u64) -> String {
    let scene = Scene::new(given, THREE);
    let run = scene.ask_with(VTC, "hello");
    assert_eq!(run.exchange.record().body_bytes, 30);
    let user = Users::number(b"alice", scene.world.hash_seed.get()).unwrap();
    let at = Tick::from_millis(scene.now + seconds * 1000);
    scene.world.users.look(user, at, &scene.world.knobs.pd.strategies.vtc).tokens.to_string()
}

pub(super) fn tokens_of_a_user(given: &Given<'_>) -> String {
    tokens_after(given, 0)
}

pub(super) fn tokens_two_minutes_later(given: &Given<'_>) -> String {
    tokens_after(given, 120)
}

/// What a prompt of 2,000 tokens is expected to take its pod, seconds.
fn preble_cost(given: &Given<'_>) -> f64 {
    let scene = Scene::new(given, THREE);
    let run = scene.ask_with(&[("routing-strategy", "prefix-cache-preble")], &prompt(8000));
    let window = scene.world.knobs.pd.strategies.preble.window;
    scene.pod(&decode_pod(&run)).state.recent.cost(scene.tick(), window)
}

pub(super) fn preble_prefill(given: &Given<'_>) -> String {
    if preble_cost(given) > 7.2 { "slow" } else { "fast" }.to_owned()
}

pub(super) fn preble_answer(given: &Given<'_>) -> String {
    if preble_cost(given) > 10.0 { "long" } else { "short" }.to_owned()
}

/// Requests that count for their pod two minutes later.
pub(super) fn preble_later(given: &Given<'_>) -> String {
    let scene = Scene::new(given, THREE);
    let run = scene.ask_with(&[("routing-strategy", "prefix-cache-preble")], "hello");
    let window = scene.world.knobs.pd.strategies.preble.window;
    let later = Tick::from_millis(scene.now + 120_000);
    scene.pod(&decode_pod(&run)).state.recent.requests(later, window).to_string()
}

/// `a` has the adapter, `b` could load it, `c` is full.
pub(super) fn who_has_the_adapter(given: &Given<'_>) -> String {
    let with = |max, names| Signals { adapters: Some(Arc::new(Adapters::new(max, [names, ""]))), ..Signals::unknown() };
    let scene = Scene::new(given, THREE);
    let scene = scene.decodes("a", 1, &with(1, "m")).decodes("b", 0, &with(1, "")).decodes("c", 0, &with(1, "x"));
    decode_pod(&scene.ask_with(&[("routing-strategy", "lora-affinity")], "hello"))
}
