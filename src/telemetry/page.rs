//! A page of metrics under construction, in either text format: what the prometheus crate would need millions of small
//! allocations for.

use std::borrow::Cow;
use std::fmt::Write as _;

/// How a page is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Prometheus text, version 0.0.4.
    Text,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

/// The ending of a counter's samples, which its family does not have in OpenMetrics.
pub(super) const TOTAL: &str = "_total";

/// What was written so far.
#[derive(Debug)]
pub(super) struct Page {
    /// The text.
    pub(super) text: String,
    format: Format,
}

impl Page {
    /// An empty page.
    pub(super) fn new(format: Format) -> Page {
        Page { text: String::with_capacity(64 << 10), format }
    }

    /// The head of a family whose kind is `counter`, `gauge` or `histogram`. In OpenMetrics, a counter whose name does not
    /// end in `_total` is of the type `unknown`.
    pub(super) fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = match self.format {
            Format::Text => {
                let help = help.replace('\\', "\\\\").replace('\n', "\\n");
                writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}")
            }
            Format::OpenMetrics => {
                let (title, kind) = match name.strip_suffix(TOTAL) {
                    Some(title) if kind == "counter" => (title, kind),
                    None if kind == "counter" => (name, "unknown"),
                    _ => (name, kind),
                };
                let unit = ["seconds", "bytes"].into_iter().find(|unit| ends_with_unit(title, unit));
                let unit = unit.map(|unit| format!("# UNIT {title} {unit}\n")).unwrap_or_default();
                let help = if help.is_empty() { String::new() } else { format!("# HELP {title} {}\n", escaped(help)) };
                write!(self.text, "# TYPE {title} {kind}\n{unit}{help}")
            }
        };
    }

    /// One sample; `labels` are written already, without braces ([`label`]).
    pub(super) fn sample(&mut self, name: &str, suffix: &str, labels: &str, value: f64) {
        let text = &mut self.text;
        text.push_str(name);
        text.push_str(suffix);
        if !labels.is_empty() {
            text.push('{');
            text.push_str(labels);
            text.push('}');
        }
        text.push(' ');
        number(text, value);
        text.push('\n');
    }
}

/// Appends `name="value"` to written labels.
pub(super) fn label(labels: &mut String, name: &str, value: &str) {
    if !labels.is_empty() {
        labels.push(',');
    }
    labels.push_str(name);
    labels.push_str("=\"");
    labels.push_str(&escaped(value));
    labels.push('"');
}

/// A text as label value.
pub(super) fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(['\\', '"', '\n']) {
        return text.into();
    }
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n").into()
}

/// Appends a value.
pub(super) fn number(text: &mut String, value: f64) {
    if value.is_finite() {
        let _ = write!(text, "{value}");
    } else if value.is_nan() {
        text.push_str("NaN");
    } else {
        text.push_str(if value > 0.0 { "+Inf" } else { "-Inf" });
    }
}

/// Does a family's name end in this unit?
pub(super) fn ends_with_unit(title: &str, unit: &str) -> bool {
    title.strip_suffix(unit).is_some_and(|rest| rest.len() > 1 && rest.ends_with('_'))
}
