//! Medians over context, a line an arm, one chart for each kind of test.

use crate::bounded_file;
use crate::measure::Row;
use crate::replace::Replacement;
use anyhow::{Context, Result};
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::*;
use std::io::Write;
use std::path::Path;

const COLOURS: [RGBColor; 9] = [
    RGBColor(120, 120, 120),
    RGBColor(200, 40, 40),
    RGBColor(40, 90, 200),
    RGBColor(40, 150, 80),
    RGBColor(140, 80, 170),
    RGBColor(200, 140, 20),
    RGBColor(20, 160, 170),
    RGBColor(110, 70, 30),
    RGBColor(220, 90, 160),
];

/// Bytes of an earlier chart that is looked at.
const LARGEST: u64 = 64 << 20;
const WIDTH: u32 = 720;
const HEIGHT: u32 = 440;

fn distinct<T: PartialEq + Clone>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen: Vec<T> = Vec::new();
    for value in values {
        if !seen.contains(&value) {
            seen.push(value);
        }
    }
    seen
}

/// A file that can be written, so that no measurement is lost to one that can't.
pub struct Destination(Replacement);

impl Destination {
    pub fn open(path: &Path) -> Result<Self> {
        let is_chart = |file: &Path| {
            let chart = bounded_file::read(file, LARGEST).ok().flatten();
            chart.is_some_and(|chart| chart.starts_with("<svg"))
        };
        let file = Replacement::of(path, "chart", is_chart).context("--plot")?;
        Ok(Self(file))
    }

    pub fn draw(mut self, title: &str, rows: &[Row]) -> Result<()> {
        let drawn = drawn(title, rows)?;
        self.0.write_all(drawn.as_bytes()).context("--plot")?;
        self.0.put()
    }
}

fn drawn(title: &str, rows: &[Row]) -> Result<String> {
    let mut svg = String::new();
    draw(&mut svg, title, rows)?;
    Ok(svg)
}

fn draw(svg: &mut String, title: &str, rows: &[Row]) -> Result<()> {
    let tests = distinct(rows.iter().map(|row| row.test.clone()));
    let root =
        SVGBackend::with_string(svg, (WIDTH, HEIGHT * tests.len() as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    for (area, test) in root.split_evenly((tests.len(), 1)).iter().zip(&tests) {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.test == *test).collect();
        chart(area, &format!("{test}: {title}"), &rows)?;
    }
    root.present()?;
    Ok(())
}

/// One axis: logarithmic over more than a decade, else from 0 on, so that there are always marks to read it by.
struct Axis {
    range: std::ops::Range<f64>,
    logarithmic: bool,
}

impl Axis {
    fn of(values: impl Iterator<Item = f64> + Clone) -> Self {
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(f64::NEG_INFINITY, f64::max);
        let logarithmic = low > 0.0 && high / low > 10.0;
        let range = match logarithmic {
            true => low / 1.3..high * 1.3,
            // A lone 0 gets some room, too.
            false => 0.0..(high * 1.15).max(1.0),
        };
        Self { range, logarithmic }
    }
}

fn chart<'a, D: DrawingBackend<ErrorType: 'static> + 'a>(
    area: &DrawingArea<D, plotters::coord::Shift>,
    title: &str,
    rows: &[&Row],
) -> Result<()> {
    let x = Axis::of(rows.iter().map(|row| row.context as f64));
    let y = Axis::of(rows.iter().map(|row| row.median_ms()));
    let mut builder = ChartBuilder::on(area);
    builder
        .caption(title, ("sans-serif", 17))
        .margin(12)
        .margin_right(24)
        .x_label_area_size(40)
        .y_label_area_size(64);
    match (x.logarithmic, y.logarithmic) {
        (true, true) => lines(
            builder.build_cartesian_2d(x.range.log_scale(), y.range.log_scale())?,
            rows,
        ),
        (true, false) => lines(
            builder.build_cartesian_2d(x.range.log_scale(), y.range)?,
            rows,
        ),
        (false, true) => lines(
            builder.build_cartesian_2d(x.range, y.range.log_scale())?,
            rows,
        ),
        (false, false) => lines(builder.build_cartesian_2d(x.range, y.range)?, rows),
    }
}

fn lines<'a, D, X, Y>(
    mut chart: ChartContext<'a, D, Cartesian2d<X, Y>>,
    rows: &[&Row],
) -> Result<()>
where
    D: DrawingBackend<ErrorType: 'static> + 'a,
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    chart
        .configure_mesh()
        .x_desc("tokens of context")
        .y_desc("milliseconds, median")
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|y| match *y >= 10.0 {
            true => format!("{y:.0}"),
            false => format!("{}", (y * 1000.0).round() / 1000.0),
        })
        .light_line_style(BLACK.mix(0.06))
        .draw()?;
    for (i, arm) in distinct(rows.iter().map(|row| row.arm.as_str()))
        .into_iter()
        .enumerate()
    {
        let colour = COLOURS[i % COLOURS.len()];
        let mut points: Vec<(f64, f64)> = rows
            .iter()
            .filter(|row| row.arm == arm)
            .map(|row| (row.context as f64, row.median_ms()))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        chart
            .draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)).point_size(3))?
            .label(arm)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.2))
        .draw()?;
    Ok(())
}
