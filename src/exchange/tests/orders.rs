//! Events in any order, for every protocol and both adapters: whatever comes, a request ends once and holds nothing then.

use proptest::prelude::*;

use super::legs::{ERROR, STREAM, TOKEN, answered, failed, fleet_of, looked_up};
use super::*;
use crate::engines::lookup::{LookedUp, LookupError};
use crate::engines::vllm::mooncake::RankEngine;
use crate::knobs::KvConnector;
use crate::state::plane::Claimed;

/// What the pods of a world run.
#[derive(Clone, Copy, Debug)]
enum Pods {
    /// vLLM, one pair; the choice of a profile may wait for a count, and one request a second is served.
    Profiled,
    /// vLLM with a second decode pod in the roleset.
    Failover,
    Mooncake,
    Sglang,
    ContextFirst,
    GenerationFirst,
    /// vLLM, whose decisions are claimed.
    Claiming,
}

const EVERY: [Pods; 7] = [
    Pods::Profiled,
    Pods::Failover,
    Pods::Mooncake,
    Pods::Sglang,
    Pods::ContextFirst,
    Pods::GenerationFirst,
    Pods::Claiming,
];

fn world_of(pods: Pods) -> Arc<World> {
    let pd = |change: fn(&mut crate::knobs::PdKnobs)| move |knobs: &mut Knobs| change(Arc::make_mut(&mut knobs.pd));
    match pods {
        Pods::Profiled => profiles::only_long_ones(),
        Pods::Failover => {
            let mut specs = fleet_of(Engine::Vllm, 2);
            specs.push(PodSpec { host: Arc::from("10.0.0.6"), ..spec("d3", Role::Decode, Some("rs")) });
            world_with(&specs, |_| {})
        }
        Pods::Mooncake => {
            world_with(&fleet_of(Engine::Vllm, 2), pd(|knobs| knobs.kv_connector = KvConnector::Mooncake))
        }
        Pods::Claiming => super::claims::claiming_world(),
        Pods::Sglang => world_with(&fleet_of(Engine::Sglang, 2), |_| {}),
        Pods::ContextFirst => world_with(&fleet_of(Engine::Trtllm, 2), |_| {}),
        Pods::GenerationFirst => {
            world_with(&fleet_of(Engine::Trtllm, 2), pd(|knobs| knobs.trt_generation_first = true))
        }
    }
}

/// Kinds of events.
const KINDS: u8 = 38;

fn make(kind: u8) -> Event {
    match kind {
        0 => head(PD),
        1 => head(&[]),
        2 => body(BODY),
        3 => Event::Body { data: Bytes::from_static(b"{"), end: false },
        4 | 30 => prefill_ok(),
        5 => prefill_failed(),
        6 => answer_head(200),
        7 => answer_head(500),
        8 => chunk("x", false),
        9 => chunk("", true),
        10 => Event::DecodeFailed { detail: String::new(), unreachable: true },
        11 => Event::Gone,
        12 => Event::Shutdown,
        13 => Event::BodyTimeout,
        14 => Event::BodyTooLarge,
        15 => Event::Misconfigured("mend it".to_owned()),
        16 => gone_after(prefill_ok()),
        17 => head(&[("config-profile", "auto")]),
        18 => sent(format!(r#"{{"model":"m","prompt":"{}"}}"#, "long ".repeat(2000))),
        19 => Event::DecodeFailed { detail: String::new(), unreachable: false },
        20 => looked_up(),
        21 => Event::LookedUp(Ok(Arc::new(LookedUp::Engine(RankEngine { id: "e".to_owned(), pin: Some(0) })))),
        22 => Event::LookedUp(Err(LookupError::Status(StatusCode::FOUND))),
        23 | 31 => Event::Timer,
        24 => Event::ServedBy("10.0.0.6:8000".to_owned()),
        25 => Event::ServedBy("10.0.0.5:8000".to_owned()),
        26 => stream_head(),
        27 => chunk(TOKEN, false),
        28 => chunk(ERROR, false),
        29 => chunk("data: [DONE]\n\n", true),
        32 => answered(200, "{}"),
        33 => answered(500, "{}"),
        34 => answered(200, "no JSON"),
        35 => failed(LegFailure::Timeout, true),
        36 => Event::Claimed(Claimed::Granted),
        37 => Event::Claimed(Claimed::Again),
        _ => Event::Prepared(Prepared::unknown()),
    }
}

/// What a request has been through before anything goes: some of the way that it should take.
fn opening(pods: Pods, stream: bool, steps: usize) -> Vec<Event> {
    let mut events = vec![head(PD), body(if stream { STREAM } else { BODY })];
    match pods {
        Pods::GenerationFirst => events.push(looked_up()),
        Pods::Mooncake => events.push(make(21)),
        Pods::Profiled | Pods::Failover => events.push(prefill_ok()),
        Pods::Claiming => events.extend([Event::Claimed(Claimed::Granted), prefill_ok()]),
        Pods::Sglang | Pods::ContextFirst => {}
    }
    events.push(if stream { stream_head() } else { answer_head(200) });
    events.truncate(steps);
    events
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn any_order_ends_once_and_releases_everything(
        (pods, front, stream) in (proptest::sample::select(EVERY.to_vec()), any::<bool>(), any::<bool>()),
        steps in 0usize..5,
        kinds in proptest::collection::vec((0..=KINDS, 0u64..2), 0..14),
    ) {
        let world = world_of(pods);
        let adapter = if front { Adapter::Front } else { Adapter::Envoy };
        let mut run = Run::over(Arc::clone(&world), adapter);
        for event in opening(pods, stream, steps) {
            run.feed(event);
        }
        for (kind, slow) in kinds {
            let before = run.effects.len();
            let ended = run.exchange.ended();
            // Longer than any timer.
            run.now += slow * 130_000;
            run.feed(make(kind));
            prop_assert!(!ended || run.effects.len() == before, "effects after the end");
            prop_assert!(run.exchange.deadline().is_none() || !run.exchange.ended(), "a timer after the end");
        }
        prop_assert_eq!(run.records().len(), usize::from(run.exchange.ended()));
        let names = run.names();
        let count = |wanted: &str| names.iter().filter(|name| **name == wanted).count();
        // Once the head of an answer is out, an error can only be shown by breaking off, and nobody else can answer.
        let out = names.iter().position(|name| *name == "head");
        let late = |name: &&str| ["refuse", "head", "route", "prefill", "answer", "drop"].contains(name);
        prop_assert!(out.is_none_or(|at| !names[at + 1..].iter().any(late)), "{:?}", names);
        prop_assert!(count("prefill") <= 2 && count("refuse") <= 1 && count("answer") <= 1, "{:?}", names);
        prop_assert!(!front || count("replace") == 0 || count("cut") == 1, "{:?}", names);
        if matches!(pods, Pods::Sglang | Pods::Mooncake | Pods::GenerationFirst) {
            prop_assert!(count("prefill") <= 1, "legs that are sent at once are sent once: {:?}", names);
        }
        if run.exchange.ended() {
            let quiet = world.fleet.load().models.values().flat_map(|model| model.pods.clone()).all(|pod| {
                let view = pod.state.load.view();
                view.prefills + view.pending + view.running == 0
            });
            prop_assert!(quiet, "charged after the end");
        }
        run.oracle();
    }
}
