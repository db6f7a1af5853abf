//! A page of metrics in the Prometheus text format.

use std::fmt::Write;

use crate::meters::Histogram;

/// A page under construction. All its lines share a prefix and labels.
pub(crate) struct Page {
    /// What was written so far.
    pub text: String,
    prefix: &'static str,
    labels: String,
}

/// A label value with what must be escaped in it.
pub(crate) fn quoted(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl Page {
    pub fn new(prefix: &'static str, labels: String) -> Page {
        Page { text: String::with_capacity(16 << 10), prefix, labels }
    }

    /// Lines from here on carry these labels.
    pub fn relabel(&mut self, labels: String) {
        self.labels = labels;
    }

    pub fn family(&mut self, name: &str, text: &str, kind: &str) {
        // Counters are declared without their suffix by the old text format's writers, with it by the newer ones.
        let name = if kind == "counter" { format!("{name}_total") } else { name.to_owned() };
        let prefix = self.prefix;
        let _ = writeln!(self.text, "# HELP {prefix}{name} {text}\n# TYPE {prefix}{name} {kind}");
    }

    pub fn line(&mut self, name: &str, more: &str, value: f64) {
        let comma = if more.is_empty() { "" } else { "," };
        let _ = writeln!(self.text, "{}{name}{{{}{comma}{more}}} {value:?}", self.prefix, self.labels);
    }

    pub fn gauge(&mut self, name: &str, text: &str, value: f64) {
        self.family(name, text, "gauge");
        self.line(name, "", value);
    }

    pub fn counter(&mut self, name: &str, text: &str, value: u64) {
        self.family(name, text, "counter");
        self.line(&format!("{name}_total"), "", value as f64);
    }

    pub fn histogram(&mut self, name: &str, text: &str, histogram: &Histogram) {
        self.family(name, text, "histogram");
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        for (bound, count) in histogram.bounds.iter().zip(&histogram.counts) {
            below += count;
            self.line(&bucket, &format!("le=\"{bound:?}\""), below as f64);
        }
        self.line(&bucket, "le=\"+Inf\"", histogram.count as f64);
        self.line(&format!("{name}_count"), "", histogram.count as f64);
        self.line(&format!("{name}_sum"), "", histogram.sum);
    }
}
