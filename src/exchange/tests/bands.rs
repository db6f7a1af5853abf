//! What the machine notes for adaptive bucket serving.

use super::*;
use crate::bands::Keeper;
use crate::exchange::plan::{LONGEST_WEIGHED, plan};
use crate::request::{Endpoint, ParsedBody};
use crate::routing::PromptLength;

fn serving(specs: &[PodSpec], serve: bool) -> Arc<World> {
    world_with(specs, |knobs| {
        let pd = Arc::make_mut(&mut knobs.pd);
        (pd.prompt_length_bucketing, pd.bucket_serve) = (true, serve);
    })
}

/// Routes a request, then lets the keeper look: the lengths that have a band now.
fn banded(world: &Arc<World>, text: &'static str) -> usize {
    let model = Arc::clone(world.fleet.load().model("m").unwrap());
    let mut keeper = Keeper::new(Arc::clone(&model.bands));
    keeper.refresh(&model, &world.knobs.pd, Tick(0));
    let mut run = Run::new(Arc::clone(world));
    run.feed(head(&[("routing-strategy", "pd")])).feed(body(text));
    assert!(!run.exchange.ended(), "{:?}", run.effects);
    keeper.refresh(&model, &world.knobs.pd, Tick(0));
    let plans = model.bands.plans();
    plans.first().map_or(0, |live| live.plan.bands().count())
}

#[test]
fn what_a_roleset_gets_is_observed() {
    assert_eq!(banded(&serving(&pair(), true), BODY), 1);
    // Token ids count exactly.
    assert_eq!(banded(&serving(&pair(), true), r#"{"model":"m","prompt":[1,2,3]}"#), 1);
}

#[test]
fn what_no_prefill_pod_gets_is_not() {
    assert_eq!(banded(&serving(&pair(), false), BODY), 0);
    // It cannot be split.
    assert_eq!(banded(&serving(&pair(), true), r#"{"model":"m","prompt":"hello","n":2}"#), 0);
}

#[test]
fn a_request_that_a_band_led_is_counted_for_its_roleset() {
    let world = serving(&pair(), true);
    assert_eq!(banded(&world, r#"{"model":"m","prompt":[1,2,3]}"#), 1);
    let mut run = Run::new(Arc::clone(&world));
    run.feed(head(&[("routing-strategy", "pd")])).feed(body(r#"{"model":"m","prompt":[1,2,3,4,5]}"#));
    let fleet = crate::telemetry::FleetGauges { rolesets: vec!["rs".into()], ..Default::default() };
    let page = world.metrics.render(&fleet, Tick(0));
    for line in [r#"band_total{roleset="rs"} 1"#, r#"prompt_tokens_total{roleset="rs"} 5"#] {
        assert!(page.contains(line), "{line} is not in {page}");
    }
}

#[test]
fn a_prompt_is_counted_as_far_as_something_depends_on_it() {
    // No range has a bound here, so that without bands a length decides nothing.
    for (serve, text, expected) in [
        (false, BODY, PromptLength::Unknown),
        (true, BODY, PromptLength::Exactly(1)),
        (true, r#"{"model":"m","prompt":"hello","n":2}"#, PromptLength::Unknown),
    ] {
        let world = serving(&pair(), serve);
        let model = Arc::clone(world.fleet.load().model("m").unwrap());
        let mut parsed = ParsedBody::parse(Endpoint::Completions, None, Bytes::from_static(text.as_bytes())).unwrap();
        let headers = HeaderMap::from_iter([("routing-strategy".parse().unwrap(), HeaderValue::from_static("pd"))]);
        let plan = plan(Adapter::Envoy, &model, &headers, None, &parsed, &world.knobs).unwrap();
        let prepared = plan.prepare(&model, &mut parsed, &world.knobs, 0).run();
        assert_eq!(prepared.length, expected, "{serve} {text}");
    }
    let world = serving(&pair(), true);
    let model = Arc::clone(world.fleet.load().model("m").unwrap());
    let text = format!(r#"{{"model":"m","prompt":"{}"}}"#, "a ".repeat(LONGEST_WEIGHED as usize + 10));
    let mut parsed = ParsedBody::parse(Endpoint::Completions, None, Bytes::from(text)).unwrap();
    let headers = HeaderMap::from_iter([("routing-strategy".parse().unwrap(), HeaderValue::from_static("pd"))]);
    let plan = plan(Adapter::Envoy, &model, &headers, None, &parsed, &world.knobs).unwrap();
    let prepared = plan.prepare(&model, &mut parsed, &world.knobs, 0).run();
    assert_eq!(prepared.length, PromptLength::MoreThan(LONGEST_WEIGHED));
}
