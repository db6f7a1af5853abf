//! The bucket labels of the reference gateway (its section 9.1). A bucket holds its lower border, not its upper one.

use std::time::Duration;

/// Borders and labels: a value below the border belongs to the label, if it belongs to none before.
#[derive(Debug)]
pub(super) struct Buckets {
    borders: &'static [(u64, &'static str)],
    last: &'static str,
}

impl Buckets {
    fn label(&self, value: u64) -> &'static str {
        self.borders.iter().find(|(border, _)| value < *border).map_or(self.last, |(_, label)| label)
    }

    /// The bucket of a number of tokens.
    pub(super) fn of_tokens(tokens: u64) -> &'static str {
        TOKENS.label(tokens)
    }

    /// The bucket of a duration.
    pub(super) fn of_duration(duration: Duration) -> &'static str {
        DURATIONS.label(micros(duration))
    }

    /// The bucket of the duration of a whole request.
    pub(super) fn of_total(duration: Duration) -> &'static str {
        TOTALS.label(micros(duration))
    }

    /// All labels in order, for the documentation.
    pub(super) fn labels(&self) -> impl Iterator<Item = &'static str> {
        self.borders.iter().map(|(_, label)| *label).chain([self.last])
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Tokens.
pub(super) const TOKENS: Buckets = Buckets {
    borders: &[
        (256, "0-256"),
        (512, "256-512"),
        (1024, "512-1024"),
        (2048, "1024-2048"),
        (4096, "2048-4096"),
        (8192, "4096-8192"),
        (16384, "8192-16384"),
        (32768, "16384-32768"),
    ],
    last: "32768+",
};

/// Parts of a request; borders in microseconds.
pub(super) const DURATIONS: Buckets = Buckets {
    borders: &[
        (1_000, "0-1ms"),
        (2_000, "1-2ms"),
        (5_000, "2-5ms"),
        (10_000, "5-10ms"),
        (20_000, "10-20ms"),
        (50_000, "20-50ms"),
        (100_000, "50-100ms"),
        (200_000, "100-200ms"),
        (500_000, "200-500ms"),
        (1_000_000, "500-1000ms"),
        (2_000_000, "1000-2000ms"),
        (5_000_000, "2000-5000ms"),
    ],
    last: "5000ms+",
};

/// Whole requests; borders in microseconds.
pub(super) const TOTALS: Buckets = Buckets {
    borders: &[
        (100_000, "0-100ms"),
        (250_000, "100-250ms"),
        (500_000, "250-500ms"),
        (1_000_000, "500-1000ms"),
        (5_000_000, "1000-5000ms"),
        (20_000_000, "5000-20000ms"),
        (60_000_000, "20000-60000ms"),
    ],
    last: "60000ms+",
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_border_belongs_to_the_bucket_above_it() {
        for (table, unit) in [(TOKENS, 1), (DURATIONS, 1000), (TOTALS, 1000)] {
            let labels: Vec<_> = table.labels().collect();
            assert_eq!(table.label(0), labels[0]);
            assert_eq!(table.label(u64::MAX), *labels.last().unwrap());
            for (index, (border, label)) in table.borders.iter().enumerate() {
                assert_eq!(table.label(border - 1), *label);
                assert_eq!(table.label(*border), labels[index + 1]);
                // The label names the border it is made of.
                assert!(label.contains(&format!("-{}", border / unit)), "{label}");
                assert!(labels[index + 1].starts_with(&(border / unit).to_string()));
            }
        }
    }

    #[test]
    fn durations_are_not_rounded() {
        assert_eq!(Buckets::of_duration(Duration::from_nanos(999_999)), "0-1ms");
        assert_eq!(Buckets::of_duration(Duration::from_millis(1)), "1-2ms");
        assert_eq!(Buckets::of_duration(Duration::MAX), "5000ms+");
        assert_eq!(Buckets::of_total(Duration::from_millis(100)), "100-250ms");
        assert_eq!(Buckets::of_tokens(32768), "32768+");
    }
}
