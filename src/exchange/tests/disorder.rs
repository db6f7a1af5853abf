//! What cannot be, and peers that are set up wrongly.

use super::*;

#[test]
fn a_peer_that_is_set_up_wrongly_is_told_and_counted() {
    let mut run = Run::new(world());
    run.feed(Event::Misconfigured("use BUFFERED".to_owned()));
    assert_eq!(run.names(), ["refuse", "end"]);
    assert_eq!((run.refusal().status.as_u16(), &*run.refusal().message), (500, "use BUFFERED"));
    assert_eq!(run.record().outcome, Outcome::Failed(Reason::Internal));
    run.oracle();
}

#[test]
fn r85_what_cannot_be_is_a_status_before_the_answers_head_and_a_cut_after_it() {
    for defect in [|| head(PD), || body(BODY), || answer_head(200), || Event::Misconfigured("mend it".to_owned())] {
        let mut run = Run::new(world());
        run.feed(head(PD)).feed(body(BODY)).feed(prefill_ok()).feed(answer_head(200)).feed(chunk("x", false));
        run.feed(defect());
        assert_eq!(run.names()[3..], ["route", "head", "chunk", "cut", "end"]);
        let record = run.record();
        assert_eq!((record.outcome, record.status), (Outcome::Failed(Reason::Internal), 200));
        run.oracle();
    }
    let mut run = Run::new(world());
    run.feed(head(PD)).feed(body(BODY)).feed(Event::Misconfigured("mend it".to_owned()));
    assert_eq!(run.names()[2..], ["prefill", "cancel", "refuse", "end"]);
    assert_eq!((run.refusal().status, &*run.refusal().message), (StatusCode::INTERNAL_SERVER_ERROR, "mend it"));
    run.oracle();
}
