//! One metric and its series.
//!
//! Not `prometheus::IntCounterVec`, for two reasons: that one finds a series by a 64-bit hash of the label values
//! written one after the other, so that `("a", "bc")` and `("ab", "c")` are one series, and it takes a lock. Here a
//! lookup hashes the values once and takes no lock. Nor its exposition, which makes two small strings of each label of each
//! series: with counters per pod, hundreds of thousands.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use papaya::Equivalent;

use super::names::{Definition, GATEWAY_POD, Kind};
use super::page::{Page, label};

/// Series of one metric; samples of further ones are counted and not kept. Labels are bounded by the fleet, so that
/// only a defect, or a fleet beyond all plans, comes here.
const MAX_SERIES: usize = 50_000;

/// The value of one series: a count, or the bits of a decimal.
#[derive(Clone, Debug, Default)]
pub(super) struct Cell(Arc<AtomicU64>);

impl Cell {
    /// Adds to a counter or a gauge.
    pub(super) fn add(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// Takes from a gauge.
    pub(super) fn subtract(&self, amount: u64) {
        self.0.fetch_sub(amount, Ordering::Relaxed);
    }

    /// Sets a whole number.
    pub(super) fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// Sets a decimal.
    pub(super) fn set_decimal(&self, value: f64) {
        self.0.store(value.to_bits(), Ordering::Relaxed);
    }

    /// The whole number.
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn read(&self, kind: Kind) -> f64 {
        let bits = self.get();
        match kind {
            Kind::Counter => bits as f64,
            Kind::Gauge => bits.cast_signed() as f64,
            Kind::Decimal => f64::from_bits(bits),
        }
    }
}

/// Owned label values.
#[derive(Debug, PartialEq, Eq)]
struct Values(Box<[Box<str>]>);

/// Borrowed ones, to look up with.
struct Borrowed<'a>(&'a [&'a str]);

// The two must hash alike. A str's hash ends with a byte that no text holds, so that values do not run together.
impl Hash for Values {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.iter().for_each(|value| value.hash(state));
    }
}

impl Hash for Borrowed<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.iter().for_each(|value| value.hash(state));
    }
}

impl Equivalent<Values> for Borrowed<'_> {
    fn equivalent(&self, key: &Values) -> bool {
        self.0.len() == key.0.len() && self.0.iter().zip(&key.0).all(|(one, other)| *one == &**other)
    }
}

/// A metric with its series.
#[derive(Debug)]
pub(super) struct Family {
    definition: &'static Definition,
    labels: &'static [&'static str],
    gateway_pod: Arc<str>,
    series: papaya::HashMap<Values, Cell, foldhash::fast::RandomState>,
    /// Takes what is not kept.
    nowhere: Cell,
    rejected: Cell,
}

impl Family {
    /// An empty family with these labels. `rejected` counts samples beyond [`MAX_SERIES`].
    pub(super) fn new(
        definition: &'static Definition,
        labels: &'static [&'static str],
        gateway_pod: &Arc<str>,
        rejected: &Cell,
    ) -> Family {
        Family {
            definition,
            labels,
            gateway_pod: Arc::clone(gateway_pod),
            series: papaya::HashMap::with_hasher(foldhash::fast::RandomState::default()),
            nowhere: Cell::default(),
            rejected: rejected.clone(),
        }
    }

    /// The series with these values of the labels other than the replica's, in the order of the definition; made when
    /// it is new.
    pub(super) fn with(&self, values: &[&str]) -> Cell {
        let series = self.series.pin();
        if let Some(cell) = series.get(&Borrowed(values)) {
            return cell.clone();
        }
        debug_assert_eq!(values.len(), self.variable_labels().count(), "{}", self.definition.name);
        if series.len() >= MAX_SERIES {
            self.rejected.add(1);
            return self.nowhere.clone();
        }
        let owned = Values(values.iter().map(|value| Box::from(*value)).collect());
        series.get_or_insert_with(owned, Cell::default).clone()
    }

    /// True when the metric has that label.
    pub(super) fn has_label(&self, name: &str) -> bool {
        self.labels.contains(&name)
    }

    /// Drops the series whose values of the two labels are not wanted any more. A metric without them keeps all.
    pub(super) fn retain(&self, labels: [&str; 2], keep: impl Fn(&str, &str) -> bool) {
        let position = |wanted| self.variable_labels().position(|label| label == wanted);
        let (Some(first), Some(second)) = (position(labels[0]), position(labels[1])) else { return };
        self.series.pin().retain(|values, _| match (values.0.get(first), values.0.get(second)) {
            (Some(first), Some(second)) => keep(first, second),
            _ => true,
        });
    }

    /// Drops the series whose value of the label is not wanted any more. A metric without it keeps all.
    pub(super) fn retain_by(&self, label: &str, keep: impl Fn(&str) -> bool) {
        let Some(position) = self.variable_labels().position(|known| known == label) else { return };
        self.series.pin().retain(|values, _| values.0.get(position).is_none_or(|value| keep(value)));
    }

    /// How many series there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.series.pin().len()
    }

    fn variable_labels(&self) -> impl Iterator<Item = &'static str> {
        self.labels.iter().copied().filter(|label| *label != GATEWAY_POD)
    }

    /// Writes the family, unless it has no series.
    pub(super) fn write(&self, page: &mut Page) {
        let series = self.series.pin();
        if series.is_empty() {
            return;
        }
        let kind = match self.definition.kind {
            Kind::Counter => "counter",
            Kind::Gauge | Kind::Decimal => "gauge",
        };
        page.family(self.definition.name, kind, self.definition.help);
        // In the order of their names; the value's place among those that callers give, or `None` for the replica's.
        let mut named: Vec<(&str, Option<usize>)> =
            self.variable_labels().enumerate().map(|(place, name)| (name, Some(place))).collect();
        if self.has_label(GATEWAY_POD) {
            named.push((GATEWAY_POD, None));
        }
        named.sort_unstable();
        let mut labels = String::with_capacity(256);
        for (values, cell) in &series {
            labels.clear();
            for (name, place) in &named {
                let value = place.map_or(Some(&*self.gateway_pod), |place| values.0.get(place).map(|value| &**value));
                label(&mut labels, name, value.unwrap_or_default());
            }
            page.sample(self.definition.name, "", &labels, cell.read(self.definition.kind));
        }
    }
}
