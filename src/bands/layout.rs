//! How prompt lengths are sorted into bins.

/// Below this length every length has a bin of its own, tokens.
const EXACT: u64 = 64;
/// Bins per doubling of the length from there on, so that a bin is at most 3.2 % wide.
const PER_OCTAVE: u64 = 32;
/// From this length on there is one bin, unless a range begins or ends there: no engine takes longer prompts.
const LONGEST: u64 = 1 << 24;

/// The bins of one model: each begins where the one before it ends, the first at 0, and the last has no end.
///
/// Beside the fixed borders there is one at every length where a roleset's range begins or ends. So no bin belongs to
/// two segments of the planner, and traffic that sits right at the border of a range is never guessed to be on the
/// wrong side of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    firsts: Box<[u64]>,
}

impl Layout {
    /// The fixed borders and these, in tokens; each length given is the first of a bin.
    pub fn new(borders: impl IntoIterator<Item = u64>) -> Layout {
        let octaves = EXACT.ilog2()..LONGEST.ilog2();
        let logarithmic = octaves.flat_map(|octave| {
            let first = 1u64 << octave;
            (0..PER_OCTAVE).map(move |step| first + step * (first / PER_OCTAVE))
        });
        let mut firsts: Vec<u64> = (0..EXACT).chain(logarithmic).chain([LONGEST]).chain(borders).collect();
        firsts.sort_unstable();
        firsts.dedup();
        Layout { firsts: firsts.into() }
    }

    /// How many bins there are; at least one.
    #[allow(clippy::len_without_is_empty, reason = "it never is")]
    pub fn len(&self) -> usize {
        self.firsts.len()
    }

    /// The bin of a prompt of so many tokens.
    pub fn bin(&self, tokens: u64) -> usize {
        self.firsts.partition_point(|first| *first <= tokens).saturating_sub(1)
    }

    /// The bin that begins with exactly this length.
    pub fn begins(&self, tokens: u64) -> Option<usize> {
        self.firsts.binary_search(&tokens).ok()
    }

    /// The shortest length in a bin; `u64::MAX` behind the last one.
    pub fn first(&self, bin: usize) -> u64 {
        self.firsts.get(bin).copied().unwrap_or(u64::MAX)
    }

    /// The longest length in a bin; `u64::MAX` in the last one.
    pub fn last(&self, bin: usize) -> u64 {
        self.firsts.get(bin + 1).map_or(u64::MAX, |next| next - 1)
    }
}
