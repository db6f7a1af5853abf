//! The exposition in OpenMetrics 1.0, which the prometheus crate does not write: it alone can carry exemplars.
//!
//! Samples have the names that they have in the text format, so that no query depends on how a page was fetched. A
//! counter whose name does not end in `_total`, which OpenMetrics does not allow, is therefore of the type `unknown`.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::SystemTime;

use prometheus::proto::{LabelPair, Metric, MetricFamily, MetricType};

use super::histogram::Exemplar;

/// The ending of a counter's samples, which its family does not have.
const TOTAL: &str = "_total";

/// Writes the page. `exemplars` knows those of a histogram's series by its family and labels, a bucket after the other.
pub(super) fn encode(
    families: &[MetricFamily],
    exemplars: impl Fn(&str, &[LabelPair]) -> Vec<Option<Arc<Exemplar>>>,
) -> String {
    let mut page = String::with_capacity(families.len() * 512);
    for family in families {
        let name = family.name();
        let kind = family.get_field_type();
        let (title, kind_name) = match (kind, name.strip_suffix(TOTAL)) {
            (MetricType::COUNTER, Some(title)) => (title, "counter"),
            (MetricType::GAUGE, _) => (name, "gauge"),
            (MetricType::HISTOGRAM, _) => (name, "histogram"),
            (MetricType::SUMMARY, _) => (name, "summary"),
            (MetricType::COUNTER | MetricType::UNTYPED, _) => (name, "unknown"),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(page, "# TYPE {title} {kind_name}");
        if let Some(unit) = ["seconds", "bytes"].into_iter().find(|unit| ends_with_unit(title, unit)) {
            let _ = writeln!(page, "# UNIT {title} {unit}");
        }
        if !family.help().is_empty() {
            let _ = writeln!(page, "# HELP {title} {}", escaped(family.help()));
        }
        for metric in family.get_metric() {
            match kind {
                MetricType::COUNTER => sample(&mut page, name, metric, None, metric.get_counter().get_value()),
                MetricType::GAUGE => sample(&mut page, name, metric, None, metric.get_gauge().get_value()),
                MetricType::HISTOGRAM => histogram(&mut page, name, metric, &exemplars(name, metric.get_label())),
                MetricType::SUMMARY => summary(&mut page, name, metric),
                MetricType::UNTYPED => {}
            }
        }
    }
    page.push_str("# EOF\n");
    page
}

fn ends_with_unit(title: &str, unit: &str) -> bool {
    title.strip_suffix(unit).is_some_and(|rest| rest.len() > 1 && rest.ends_with('_'))
}

fn sample(page: &mut String, name: &str, metric: &Metric, extra: Option<(&str, &str)>, value: f64) {
    begin(page, name, "", metric, extra);
    let _ = writeln!(page, " {}", number(value));
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
            let _ = write!(page, " # {{trace_id=\"{}\"}} {}", exemplar.trace.id, number(exemplar.value));
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
    let _ = writeln!(page, " {}", number(histogram.get_sample_sum()));
}

fn summary(page: &mut String, name: &str, metric: &Metric) {
    let summary = metric.get_summary();
    for quantile in summary.get_quantile() {
        sample(page, name, metric, Some(("quantile", &border_text(quantile.quantile()))), quantile.value());
    }
    begin(page, name, "_count", metric, None);
    let _ = writeln!(page, " {}", summary.sample_count());
    begin(page, name, "_sum", metric, None);
    let _ = writeln!(page, " {}", number(summary.sample_sum()));
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

fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(['\\', '"', '\n']) {
        return text.into();
    }
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n").into()
}

fn number(value: f64) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned()
    } else {
        value.to_string()
    }
}

/// Borders are labels and are compared as text, so that OpenMetrics wants each number in one spelling: a decimal point
/// always, and an exponent below 0.0001 and from a million on.
fn border_text(value: f64) -> String {
    if !value.is_finite() {
        return number(value);
    }
    if value != 0.0 && !(1e-4..1e6).contains(&value.abs()) {
        let text = format!("{value:e}");
        let Some((digits, exponent)) = text.split_once('e') else { return text };
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = value.to_string();
    if text.contains('.') { text } else { text + ".0" }
}

#[cfg(test)]
mod tests;
