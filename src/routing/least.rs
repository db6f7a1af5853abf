//! The least of several scores, ties broken uniformly at random.

use crate::rng::Rng;

/// Keeps the item with the least score it was offered.
#[derive(Clone, Debug)]
pub(super) struct Least<T> {
    best: Option<(f64, T)>,
    ties: usize,
}

impl<T> Default for Least<T> {
    fn default() -> Self {
        Least { best: None, ties: 0 }
    }
}

impl<T: Copy> Least<T> {
    /// Offers one item. Equal least scores win with equal probability, whatever their order; a score that is not a
    /// number never wins.
    pub(super) fn offer(&mut self, score: f64, item: T, rng: &mut Rng) {
        match self.best {
            _ if score.is_nan() => {}
            Some((best, _)) if score > best => {}
            Some((best, _)) if score == best => {
                self.ties += 1;
                if rng.below(self.ties) == 0 {
                    self.best = Some((score, item));
                }
            }
            _ => {
                self.best = Some((score, item));
                self.ties = 1;
            }
        }
    }

    /// How many items share the least score.
    pub(super) fn ties(&self) -> usize {
        self.ties
    }

    /// The winner and its score; `None` when nothing was offered.
    pub(super) fn winner(&self) -> Option<(T, f64)> {
        self.best.map(|(score, item)| (item, score))
    }
}

/// The item with the least score.
pub(super) fn least<T: Copy>(items: impl IntoIterator<Item = (f64, T)>, rng: &mut Rng) -> Option<(T, f64)> {
    let mut least = Least::default();
    for (score, item) in items {
        least.offer(score, item, rng);
    }
    least.winner()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_wins_and_nan_never_does() {
        let mut rng = Rng::new(1);
        assert_eq!(least([(3.0, 'a'), (1.0, 'b'), (2.0, 'c')], &mut rng), Some(('b', 1.0)));
        assert_eq!(least([(f64::NAN, 'a'), (f64::INFINITY, 'b')], &mut rng), Some(('b', f64::INFINITY)));
        assert_eq!(least([(f64::NAN, 'a')], &mut rng), None);
        assert_eq!(least::<char>([], &mut rng), None);
    }

    #[test]
    fn ties_are_uniform() {
        let mut rng = Rng::new(2);
        let mut seen = [0u32; 4];
        for _ in 0..40_000 {
            // A worse and a first-better score among them must not disturb the count of ties.
            let items = [(2.0, 0), (1.0, 0), (1.0, 1), (5.0, 3), (1.0, 2), (1.0, 3)];
            let (item, _) = least(items, &mut rng).unwrap();
            seen[item] += 1;
        }
        assert!(seen.iter().all(|n| (9_500..10_500).contains(n)), "{seen:?}");
    }
}
