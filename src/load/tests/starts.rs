//! Ages in one word.

use proptest::prelude::*;

use super::super::starts::Starts;
use crate::clock::Tick;

#[test]
fn ages_add_up() {
    let starts = Starts::default();
    assert_eq!(starts.ages_ms(Tick::from_millis(5)), (0, 0));
    starts.add(Tick::from_millis(1_000));
    assert_eq!(starts.ages_ms(Tick::from_millis(1_000)), (1, 0));
    assert_eq!(starts.ages_ms(Tick::from_millis(999)), (1, 0), "begun after the reader's now");
    starts.add(Tick::from_millis(2_000));
    assert_eq!(starts.ages_ms(Tick::from_millis(4_500)), (2, 6_000));
    starts.remove(Tick::from_millis(1_000));
    assert_eq!(starts.ages_ms(Tick::from_millis(4_500)), (1, 2_500));
    starts.remove(Tick::from_millis(2_000));
    assert_eq!(starts.ages_ms(Tick(u64::MAX)), (0, 0));
}

proptest! {
    /// Whatever the clock says, also when the sum of the starts has wrapped many times.
    #[test]
    fn the_sum_is_exact_beyond_its_width(
        base in 0u64..1 << 43,
        ages in proptest::collection::vec(0u64..10_000_000, 0..200),
        keep in 0usize..200,
    ) {
        let now = base + 10_000_000;
        let starts = Starts::default();
        for age in &ages {
            starts.add(Tick::from_millis(now - age));
        }
        for age in ages.iter().skip(keep) {
            starts.remove(Tick::from_millis(now - age));
        }
        let open: Vec<_> = ages.iter().take(keep).collect();
        let expected = open.iter().copied().sum::<u64>();
        prop_assert_eq!(starts.ages_ms(Tick::from_millis(now)), (open.len() as u64, expected));
    }
}
