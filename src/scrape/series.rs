//! One sample line taken apart, and the total over the series of one name.

/// Models, and reporting ranks of each, that are told apart under one name; series of further ones are left out.
const MAX_MODELS: usize = 64;
const MAX_RANKS: usize = 1024;

/// How the series of one name make one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Join {
    /// Counts add up.
    Sum,
    /// Of shares the largest counts.
    Max,
}

impl Join {
    fn apply(self, a: f64, b: f64) -> f64 {
        match self {
            Join::Sum => a + b,
            Join::Max => a.max(b),
        }
    }
}

/// Splits `{labels} value…` (or ` value…`) at the brace that closes the labels. `None` when it does not close.
pub(super) fn split_labels(rest: &str) -> Option<(&str, &str)> {
    let Some(inside) = rest.strip_prefix('{') else { return Some(("", rest)) };
    let (mut quoted, mut escaped) = (false, false);
    let end = inside.bytes().position(|byte| {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return true,
            _ => {}
        }
        false
    })?;
    Some((inside.get(..end)?, inside.get(end + 1..)?))
}

/// The sample's value: the first word; a timestamp or an exemplar may follow. Only finite values that are not negative
/// are values: none of the wanted metrics can be anything else.
pub(super) fn value(rest: &str) -> Option<f64> {
    let value: f64 = rest.split_ascii_whitespace().next()?.parse().ok()?;
    (value.is_finite() && value >= 0.0).then_some(value)
}

/// The next `name="text"` and what follows it; the text is still escaped.
pub(super) fn next_label(labels: &str) -> Option<(&str, &str, &str)> {
    let (name, rest) = labels.split_once('=')?;
    let rest = rest.trim_start().strip_prefix('"')?;
    let mut escaped = false;
    let end = rest.bytes().position(|byte| {
        if escaped {
            escaped = false;
            return false;
        }
        escaped = byte == b'\\';
        byte == b'"'
    })?;
    Some((name.trim_matches([',', ' ', '\t']), rest.get(..end)?, rest.get(end + 1..)?))
}

/// Compares a label text that may hold `\\`, `\"` and `\n` with a plain text.
fn unescaped_equals(text: &str, plain: &str) -> bool {
    if !text.contains('\\') {
        return text == plain;
    }
    let mut characters = text.chars();
    let unescaped = std::iter::from_fn(|| match characters.next()? {
        '\\' => Some(match characters.next() {
            Some('n') => '\n',
            Some(other) => other,
            None => '\\',
        }),
        other => Some(other),
    });
    unescaped.eq(plain.chars())
}

/// A reporting process: data-parallel group first, then its place within the group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Rank {
    dp: u32,
    within: (u32, u32, u32),
}

/// Which labels a series has: their number, and a sum over their names that does not depend on their order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LabelNames {
    count: u32,
    sum: u64,
}

impl LabelNames {
    fn add(&mut self, name: &str) {
        // FNV-1a.
        let hash = name
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        (self.count, self.sum) = (self.count.saturating_add(1), self.sum.wrapping_add(hash));
    }
}

/// Where a series comes from.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Labels<'a> {
    /// Still escaped; empty where no model is named.
    model: &'a str,
    rank: Rank,
    names: LabelNames,
    /// Upper border of a histogram's bucket.
    pub(super) border: Option<f64>,
    /// vLLM's label of the sleep gauge.
    pub(super) sleep_state: &'a str,
}

impl<'a> Labels<'a> {
    /// Reads what is between the braces. An empty value is as good as no label (the data model of Prometheus).
    pub(super) fn read(mut text: &'a str) -> Labels<'a> {
        let mut labels = Labels::default();
        while let Some((name, value, rest)) = next_label(text) {
            text = rest;
            if value.is_empty() {
                continue;
            }
            let number = || value.parse().unwrap_or(0);
            match name {
                "model_name" => {
                    labels.model = if value == "undefined" { "" } else { value };
                    continue;
                }
                "le" => {
                    labels.border = value.parse().ok();
                    continue;
                }
                "sleep_state" => labels.sleep_state = value,
                "dp_rank" => labels.rank.dp = number(),
                "pp_rank" => labels.rank.within.0 = number(),
                "tp_rank" => labels.rank.within.1 = number(),
                "moe_ep_rank" => labels.rank.within.2 = number(),
                _ => {}
            }
            labels.names.add(name);
        }
        labels
    }
}

/// The total of one model's series.
#[derive(Clone, Debug)]
struct OfModel<'a> {
    model: &'a str,
    names: LabelNames,
    /// One entry, unless one rank speaks for its data-parallel group.
    ranks: Vec<(Rank, f64)>,
}

/// The series of one name, added up.
///
/// Engines break some metrics down by further labels (priority, kind of request, …), beside the total or in place of it.
/// The series with the fewest labels are the total; where it is missing, those of the first breakdown on the page add up
/// to it. So no request counts twice.
#[derive(Clone, Debug, Default)]
pub(super) struct Total<'a> {
    models: Vec<OfModel<'a>>,
}

impl<'a> Total<'a> {
    /// Takes one series in. `one_rank`: of each data-parallel group only one process counts.
    pub(super) fn add(&mut self, join: Join, value: f64, labels: &Labels<'a>, one_rank: bool) {
        let found = self.models.iter_mut().position(|of| of.model == labels.model);
        let index = match found {
            Some(index) => index,
            None if self.models.len() >= MAX_MODELS => return,
            None => {
                self.models.push(OfModel { model: labels.model, names: labels.names, ranks: Vec::new() });
                self.models.len() - 1
            }
        };
        let Some(of) = self.models.get_mut(index) else { return };
        if labels.names.count < of.names.count {
            // What came before were parts of this.
            of.names = labels.names;
            of.ranks.clear();
        } else if labels.names != of.names {
            return;
        }
        let rank = if one_rank { labels.rank } else { Rank::default() };
        if let Some((_, sum)) = of.ranks.iter_mut().find(|(known, _)| *known == rank) {
            *sum = join.apply(*sum, value);
        } else if of.ranks.len() < MAX_RANKS {
            of.ranks.push((rank, value));
        }
    }

    /// The number of `model`: that of the series which name it; without such, of those which name none; and when all
    /// name others (the engine may report a served name or an adapter), of all.
    pub(super) fn of(&self, join: Join, model: &str) -> Option<f64> {
        let total = |wanted: &dyn Fn(&str) -> bool| {
            self.models
                .iter()
                .filter(|of| wanted(of.model))
                .filter_map(|of| of.total(join))
                .reduce(|a, b| join.apply(a, b))
        };
        total(&|name| !name.is_empty() && unescaped_equals(name, model))
            .or_else(|| total(&str::is_empty))
            .or_else(|| total(&|_| true))
    }
}

impl OfModel<'_> {
    /// With rank labels: of each data-parallel group the lowest rank counts. Normally it is the only one that
    /// reports; when all do, each repeats the same numbers.
    fn total(&self, join: Join) -> Option<f64> {
        let lowest =
            |rank: &Rank| !self.ranks.iter().any(|(other, _)| other.dp == rank.dp && other.within < rank.within);
        self.ranks.iter().filter(|(rank, _)| lowest(rank)).map(|(_, value)| *value).reduce(|a, b| join.apply(a, b))
    }
}
