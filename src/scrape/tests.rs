//! Tests of pages, rates and the scraping tasks.

mod export;
mod http;
mod parse;
mod rates;
mod scraper;
