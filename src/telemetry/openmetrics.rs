//! What the prometheus crate keeps, in OpenMetrics 1.0, which it does not write: that alone can carry exemplars.
//!
//! Samples have the names that they have in the text format, so that no query depends on how a page was fetched. A
//! counter whose name does not end in `_total`, which OpenMetrics does not allow, is therefore of the type `unknown`.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::SystemTime;

use prometheus::proto::{LabelPair, Metric, MetricFamily, MetricType};

use super::histogram::Exemplar;
use super::page::{Page, escaped, number};

/// Writes families. `exemplars` knows those of a histogram's series by its family and labels, a bucket after the other.
pub(super) fn encode(
    page: &mut Page,
    families: &[MetricFamily],
    exemplars: impl Fn(&str, &[LabelPair]) -> Vec<Option<Arc<Exemplar>>>,
) {
    for family in families {
        let name = family.name();
        let kind = family.get_field_type();
        let kind_name = match kind {
            MetricType::COUNTER => "counter",
            MetricType::GAUGE => "gauge",
            MetricType::HISTOGRAM => "histogram",
            MetricType::SUMMARY => "summary",
            MetricType::UNTYPED => "unknown",
        };
        page.family(name, kind_name, family.help());
        let page = &mut page.text;
        for metric in family.get_metric() {
            match kind {
                MetricType::COUNTER => sample(page, name, metric, None, metric.get_counter().get_value()),
                MetricType::GAUGE => sample(page, name, metric, None, metric.get_gauge().get_value()),
                MetricType::HISTOGRAM => histogram(page, name, metric, &exemplars(name, metric.get_label())),
                MetricType::SUMMARY => summary(page, name, metric),
                MetricType::UNTYPED => {}
            }
        }
    }
}

fn sample(page: &mut String, name: &str, metric: &Metric, extra: Option<(&str, &str)>, value: f64) {
    begin(page, name, "", metric, extra);
    let _ = writeln!(page, " {}", text(value));
}

fn histogram(page: &mut String, name: &str, metric: &Metric, exemplars: &[Option<Arc<Exemplar>>]) {
    let histogram = metric.get_histogram();
    let count = histogram.get_sample_count();
    let finite = histogram.get_bucket().iter().map(|bucket| (bucket.upper_bound(), bucket.cumulative_count()));
    let mut before = 0;
    for (index, (border, cumulative)) in finite.chain([(f64::INFINITY, count)]).enumerate() {
        begin(page, name, "_bucket", metric, Some(("le", &border_text(border))));
        let _ = write!(page, " {cumulative}");
        // An exemplar that came after the counts were read may belong to a bucket that is still empty here.
        if let Some(Some(exemplar)) = exemplars.get(index).filter(|_| cumulative > before) {
            let _ = write!(page, " # {{trace_id=\"{}\"}} {}", exemplar.trace.id, text(exemplar.value));
            if let Ok(at) = exemplar.trace.at.duration_since(SystemTime::UNIX_EPOCH) {
                let _ = write!(page, " {}.{:03}", at.as_secs(), at.subsec_millis());
            }
        }
        page.push('\n');
        before = cumulative;
    }
    begin(page, name, "_count", metric, None);
    let _ = writeln!(page, " {count}");
    begin(page, name, "_sum", metric, None);
    let _ = writeln!(page, " {}", text(histogram.get_sample_sum()));
}

fn summary(page: &mut String, name: &str, metric: &Metric) {
    let summary = metric.get_summary();
    for quantile in summary.get_quantile() {
        sample(page, name, metric, Some(("quantile", &border_text(quantile.quantile()))), quantile.value());
    }
    begin(page, name, "_count", metric, None);
    let _ = writeln!(page, " {}", summary.sample_count());
    begin(page, name, "_sum", metric, None);
    let _ = writeln!(page, " {}", text(summary.sample_sum()));
}

/// Name and labels.
fn begin(page: &mut String, name: &str, suffix: &str, metric: &Metric, extra: Option<(&str, &str)>) {
    let _ = write!(page, "{name}{suffix}");
    let own = metric.get_label().iter().map(|label| (label.name(), label.value()));
    let mut opening = '{';
    for (key, value) in own.chain(extra) {
        let _ = write!(page, "{opening}{key}=\"{}\"", escaped(value));
        opening = ',';
    }
    if opening == ',' {
        page.push('}');
    }
}

/// A value as text.
fn text(value: f64) -> String {
    let mut text = String::new();
    number(&mut text, value);
    text
}

/// Borders are labels and are compared as text, so that OpenMetrics wants each number in one spelling: a decimal point
/// always, and an exponent below 0.0001 and from a million on.
pub(super) fn border_text(value: f64) -> String {
    if !value.is_finite() {
        return text(value);
    }
    if value != 0.0 && !(1e-4..1e6).contains(&value.abs()) {
        let plain = format!("{value:e}");
        let Some((digits, exponent)) = plain.split_once('e') else { return plain };
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let plain = value.to_string();
    if plain.contains('.') { plain } else { plain + ".0" }
}

#[cfg(test)]
mod tests;
