//! In which format a scraper wants its metrics.

use axum::http::HeaderMap;
use axum::http::header::ACCEPT;

/// The formats of `/metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// The Prometheus text format, 0.0.4.
    Text,
    /// OpenMetrics 1.0.
    OpenMetrics,
}

impl Format {
    /// The answer's `content-type`.
    pub(super) fn content_type(self) -> &'static str {
        match self {
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// OpenMetrics for who names it and does not like plain text better; wildcards ask for nothing in particular.
pub(super) fn wanted(headers: &HeaderMap) -> Format {
    let (mut openmetrics, mut text) = (0.0_f64, 0.0_f64);
    for range in headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()).flat_map(|all| all.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let kind = parts.next().unwrap_or_default();
        let (mut quality, mut known) = (1.0_f64, true);
        for (name, value) in parts.filter_map(|parameter| parameter.split_once('=')) {
            let value = value.trim().trim_matches('"');
            match name.trim().to_ascii_lowercase().as_str() {
                // What cannot be read is not wanted.
                "q" => quality = value.parse().ok().filter(|q| (0.0..=1.0).contains(q)).unwrap_or(0.0),
                "version" => known = matches!(value, "1.0.0" | "0.0.1"),
                _ => {}
            }
        }
        if kind.eq_ignore_ascii_case("application/openmetrics-text") && known {
            openmetrics = openmetrics.max(quality);
        } else if kind.eq_ignore_ascii_case("text/plain") {
            text = text.max(quality);
        }
    }
    if openmetrics > 0.0 && openmetrics >= text { Format::OpenMetrics } else { Format::Text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scraper_chooses() {
        let om = "application/openmetrics-text";
        let prometheus_2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let prometheus_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, expected) in [
            (None, Format::Text),
            (Some(""), Format::Text),
            (Some("*/*"), Format::Text),
            (Some("text/html,application/xhtml+xml,*/*;q=0.8"), Format::Text),
            (Some("text/plain"), Format::Text),
            (Some(om), Format::OpenMetrics),
            (Some("Application/OpenMetrics-Text; Version=\"1.0.0\"; charset=utf-8"), Format::OpenMetrics),
            (Some(prometheus_2), Format::OpenMetrics),
            (Some(prometheus_3), Format::OpenMetrics),
            (Some("application/openmetrics-text;q=0.5,text/plain;q=0.5"), Format::OpenMetrics),
            (Some("application/openmetrics-text;q=0.4,text/plain;q=0.5"), Format::Text),
            (Some("application/openmetrics-text;q=0"), Format::Text),
            (Some("application/openmetrics-text;q=NaN"), Format::Text),
            (Some("application/openmetrics-text;q=2"), Format::Text),
            (Some("application/openmetrics-text;version=2.0.0"), Format::Text),
            (Some(";;==,,"), Format::Text),
        ] {
            let mut headers = HeaderMap::new();
            if let Some(accept) = accept {
                headers.insert(ACCEPT, accept.parse().unwrap());
            }
            assert_eq!(wanted(&headers), expected, "{accept:?}");
        }
        let mut two = HeaderMap::new();
        two.append(ACCEPT, "text/plain;q=0.1".parse().unwrap());
        two.append(ACCEPT, om.parse().unwrap());
        assert_eq!(wanted(&two), Format::OpenMetrics, "one field in two lines");
    }
}
