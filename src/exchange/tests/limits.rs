//! Bounds: streams, bytes, time.

use super::*;

#[test]
fn limits_on_streams_and_on_buffered_bytes_refuse() {
    let world = world_with(&pair(), |knobs| knobs.limits.max_streams = 1);
    let mut first = Run::new(Arc::clone(&world));
    first.feed(head(&[]));
    let mut second = Run::new(Arc::clone(&world));
    second.feed(head(&[]));
    assert_eq!(second.refusal().status, StatusCode::SERVICE_UNAVAILABLE);
    drop((first, second));
    assert_clean(&world);

    let world = world_with(&pair(), |knobs| knobs.limits.max_buffered_bytes = 700);
    let part = || Event::Body { data: Bytes::from(vec![b' '; 400]), end: false };
    let mut first = Run::new(Arc::clone(&world));
    first.feed(head(&[])).feed(part());
    let mut second = Run::new(Arc::clone(&world));
    second.feed(head(&[])).feed(part());
    assert_eq!(second.refusal().reason, Reason::Overloaded);
    drop((first, second));
    assert_clean(&world);
}

#[test]
fn heads_count_as_held_bytes_until_the_hand_over() {
    let long: &'static str = "x".repeat(10_000).leak();
    let head = || head(&[("routing-strategy", "pd"), ("x-long", long)]);
    let world = world_with(&pair(), |knobs| knobs.limits.max_buffered_bytes = 15_000);
    let mut first = Run::new(Arc::clone(&world));
    first.feed(head()).feed(body(BODY));
    let held = world.buffered.used();
    assert!((10_000 + BODY.len()..11_000).contains(&held), "{held}");
    let mut second = Run::new(Arc::clone(&world));
    second.feed(head());
    assert_eq!(second.refusal().reason, Reason::Overloaded);
    first.feed(prefill_ok());
    assert_eq!(world.buffered.used(), 0, "Envoy has the request now");
    first.feed(Event::Gone);
    drop(first);
    second.oracle();
}

/// Whoever leaves gives back what it held, wherever it waited, and nothing of it is sent later.
#[test]
fn r29_permits_come_back_when_clients_leave() {
    let small = |knobs: &mut Knobs| {
        knobs.limits.max_streams = 4;
        knobs.limits.max_buffered_bytes = 4 * 1500;
    };
    let steps: [fn() -> Event; 4] = [|| head(PD), || body(BODY), prefill_ok, || answer_head(200)];
    for adapter in [Adapter::Envoy, Adapter::Front] {
        for taken in 1..=steps.len() {
            let world = world_with(&pair(), small);
            let mut queue: Vec<Run> = (0..4).map(|_| Run::over(Arc::clone(&world), adapter)).collect();
            for run in &mut queue {
                for step in &steps[..taken] {
                    run.feed(step());
                }
            }
            let mut fifth = Run::over(Arc::clone(&world), adapter);
            fifth.feed(head(PD));
            assert_eq!(fifth.refusal().reason, Reason::Overloaded, "after {taken} steps");
            for run in &mut queue {
                run.feed(Event::Gone);
                let sent = run.effects.len();
                run.feed(prefill_ok()).feed(answer_head(200));
                assert_eq!(run.effects.len(), sent, "nothing is sent after the end");
            }
            drop((queue, fifth));
            assert_clean(&world);
            let mut next: Vec<Run> = (0..4).map(|_| Run::over(Arc::clone(&world), adapter)).collect();
            for run in &mut next {
                for step in steps {
                    run.feed(step());
                }
                run.feed(chunk("{}", true));
                assert_eq!(run.record().outcome, Outcome::Success);
            }
            drop(next);
            assert_clean(&world);
        }
    }
}

#[test]
fn the_front_holds_a_request_until_its_pod_answers() {
    let world = world();
    let mut run = Run::over(Arc::clone(&world), Adapter::Front);
    run.feed(head(PD)).feed(body(BODY)).feed(prefill_ok());
    assert_eq!(run.names().last(), Some(&"route"));
    assert!(world.buffered.used() >= BODY.len());
    run.feed(answer_head(200));
    assert_eq!(world.buffered.used(), 0);
    run.feed(chunk("{}", true));
    run.oracle();
}

#[test]
fn a_body_that_is_late_or_was_lost_is_refused() {
    for (event, status, reason) in
        [(Event::BodyTimeout, 408, Reason::BodyTimeout), (Event::BodyTooLarge, 413, Reason::BodyTooLarge)]
    {
        let mut run = Run::new(world());
        run.feed(head(PD)).feed(event);
        assert_eq!((run.refusal().status.as_u16(), run.refusal().reason), (status, reason));
        assert_eq!(run.record().outcome, Outcome::Failed(reason));
        run.oracle();
    }
    // The timer of a body that has arrived says nothing.
    let mut run = Run::new(world());
    run.feed(head(PD)).feed(body(BODY)).feed(Event::BodyTimeout);
    assert_eq!(run.names(), ["accept", "extend", "prefill"]);
    run.feed(Event::Gone);
    run.oracle();
}

#[test]
fn the_prompt_is_not_held_twice_while_the_prefill_leg_runs() {
    let mut run = Run::new(world());
    let long: &'static str = format!("{{\"model\":\"m\",\"prompt\":\"{}\"}}", "x".repeat(2 << 20)).leak();
    run.feed(head(PD)).feed(body(long));
    let Some(Effect::Prepare(job)) = run.effects.pop() else { panic!("{:?}", run.names()) };
    let hash = job.hash.as_ref().expect("something to hash");
    assert_eq!((hash.key.len(), hash.key.first()), (2 << 20, Some(&b'x')));
    run.feed(Event::Prepared(job.run()));
    assert_eq!(run.names(), ["accept", "extend", "prefill"]);
    run.feed(Event::Gone);
    run.oracle();
}
