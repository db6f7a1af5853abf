//! Tests of pages, rates and the scraping tasks.

mod http;
mod parse;
mod rates;
mod scraper;
