//! How often replicas may sync.

use std::time::Duration;

/// The time between the starts of two syncs of one replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// At least this.
    pub least: Duration,
    /// What one sync costs the server: a round figure for a few changed pods on a slow core.
    pub cost: Duration,
    /// What its announcement costs the server for each member that hears it. With 16 members that is most of it: 340 to
    /// 500 µs of processor time were measured in all.
    pub cost_per_member: Duration,
    /// The part of one core of the server that the syncs of all replicas of a model may take.
    pub budget: f64,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            least: Duration::from_millis(5),
            cost: Duration::from_micros(150),
            cost_per_member: Duration::from_micros(17),
            budget: 0.2,
        }
    }
}

impl Pace {
    /// The interval among `members` replicas: each has its part of the budget.
    pub fn interval(&self, members: u32) -> Duration {
        let members = f64::from(members);
        let cost = self.cost.as_secs_f64() + self.cost_per_member.as_secs_f64() * members;
        let needed = cost * members / self.budget;
        if needed.is_finite() { self.least.max(Duration::from_secs_f64(needed.clamp(0.0, 60.0))) } else { self.least }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_with_the_members_so_that_the_server_is_not_asked_for_more() {
        let pace = Pace::default();
        for (members, micros) in [(0, 5_000), (1, 5_000), (4, 5_000), (8, 11_440), (16, 33_760), (100, 925_000)] {
            assert_eq!(pace.interval(members), Duration::from_micros(micros), "{members}");
        }
        assert_eq!(Pace { budget: 0.0, ..pace }.interval(3), pace.least);
        assert_eq!(Pace { budget: f64::NAN, ..pace }.interval(3), pace.least);
        assert_eq!(pace.interval(u32::MAX), Duration::from_mins(1));
    }
}
