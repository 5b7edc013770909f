"""The page's style: one sheet for light and dark; no fonts or images are loaded.

Hues follow Okabe and Ito's palette for colour-blind readers (2008), shifted for contrast on a light and a dark page.
What is held is grey, so that colour shows what the plan decides about.
"""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;
--page:#fbfbfa;--raised:#fff;--ink:#1d2127;--soft:#565e6b;--faint:#e3e5e8;--accent:#1f66b0;--good:#1b7a4b;--bad:#b3261e;
--parameters:#8791a1;--optimizer:#a4acb9;--buffers:#bac0ca;--batch:#cdd2d9;--constants:#c2c5b8;--other:#b7b2a8;
--kept:#3f7fc4;--codes:#7d5fb2;--recomputed:#e0792b;--gradients:#239a78;--outputs:#c8649f;--temporaries:#e3bd4a;
--workspace:#a4574f}
@media(prefers-color-scheme:dark){:root{
--page:#14161a;--raised:#1b1e24;--ink:#e7e9ec;--soft:#a2aab6;--faint:#30353d;--accent:#7db4f0;--good:#6fd3a0;--bad:#ff9a90;
--parameters:#6f7988;--optimizer:#5a6371;--buffers:#4a525e;--batch:#3d444f;--constants:#55584b;--other:#5e584c;
--kept:#4f8fd6;--codes:#9b7fd4;--recomputed:#ea8a3d;--gradients:#2fae88;--outputs:#d878b2;--temporaries:#d6b145;
--workspace:#bb6b62}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:40px 28px 72px}
h1{font-size:27px;line-height:1.25;margin:0 0 6px;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:18px;margin:48px 0 4px;letter-spacing:-.005em}
h3{font-size:15px;margin:26px 0 8px}
p{margin:0 0 12px;max-width:76ch}.note{color:var(--soft);font-size:14px}
.verdict{font-size:17px;margin:0}.verdict b.good{color:var(--good)}.verdict b.bad{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(168px,1fr));gap:1px;margin:26px 0 0;padding:0;
background:var(--raised);border:1px solid var(--faint);border-radius:10px;overflow:hidden}
.tiles div{box-shadow:0 0 0 1px var(--faint);padding:14px 18px}
.tiles dt{color:var(--soft);font-size:13px}
.tiles dd{margin:2px 0 0;font-size:22px;font-weight:600;letter-spacing:-.01em;font-variant-numeric:tabular-nums}
.tiles dd small{display:block;font-size:13px;font-weight:400;color:var(--soft);letter-spacing:0}
figure{margin:14px 0 0;background:var(--raised);border:1px solid var(--faint);border-radius:10px;padding:12px 12px 14px}
svg{display:block;width:100%;height:auto}svg.small{display:none}
svg:focus-visible,summary:focus-visible,.table:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:var(--soft)}
svg .pass{font-size:13px}
svg .budget-label,svg .peak-label{fill:var(--ink);font-weight:600;paint-order:stroke;stroke:var(--raised);
stroke-width:4px;stroke-linejoin:round}
.grid{stroke:var(--faint);fill:none}.boundary{stroke:var(--soft);stroke-dasharray:1 4;fill:none}
.budget{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:7 5;fill:none}
.peak{fill:var(--raised);stroke:var(--ink);stroke-width:2}
.cursor{stroke:var(--ink);stroke-width:1;fill:none;pointer-events:none}
.band{stroke:var(--raised);stroke-width:.5}.band.shaded{fill-opacity:.84}
.band.chosen{stroke:var(--ink);stroke-width:1.5;fill-opacity:1}
.line{fill:none;stroke:var(--kept);stroke-width:2}.point{fill:var(--kept)}
.quiet-line{fill:none;stroke:var(--optimizer);stroke-width:1.2}.test-line{fill:none;stroke:var(--recomputed);stroke-width:2}
.test-point{fill:var(--recomputed)}.key-train{background:var(--optimizer)}.key-test{background:var(--recomputed)}
.best{stroke:var(--soft);stroke-dasharray:1 4;fill:none}
.cell.right{fill:var(--kept)}.cell.wrong{fill:var(--recomputed)}svg .count{fill:var(--ink)}
.lane-computing{fill:var(--kept);background:var(--kept)}.lane-waiting{fill:var(--batch);background:var(--batch)}
.lane-sending{fill:var(--recomputed);background:var(--recomputed);fill-opacity:.62}
.here{fill:var(--recomputed);stroke:var(--raised);stroke-width:2}
.measured{fill:var(--raised);stroke:var(--recomputed);stroke-width:2.5}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;list-style:none;margin:12px 6px 0;padding:0;font-size:13px;
color:var(--soft)}
.legend i,td i{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
.table{overflow-x:auto;margin:10px 0 0}.table+.note{margin-top:10px}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;font-weight:600;font-size:13px;color:var(--soft);white-space:nowrap}
th,td{padding:6px 14px 6px 0;border-bottom:1px solid var(--faint);vertical-align:top}
td.number,th.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td.name,td.value{overflow-wrap:anywhere;min-width:7em}td.value code{display:inline-block;min-width:16em;max-width:24em}
td.location{overflow-wrap:anywhere;min-width:13em}td.location small{display:block;font-size:13px;color:var(--soft)}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
td.what{white-space:nowrap}td.why{color:var(--soft);min-width:24em}
.narrow table{width:auto;min-width:min(560px,100%)}.narrow td,.narrow th{padding-right:36px}
tr.total td{font-weight:600;border-bottom:0}
.bar{width:34%;min-width:120px}.bar span{display:block;height:11px;margin-top:6px;border-radius:3px;min-width:2px}
details{margin:12px 0 0}summary{cursor:pointer;font-weight:600;padding:4px 0}
summary span{font-weight:400;color:var(--soft)}
#tip{position:fixed;z-index:2;left:0;top:0;max-width:430px;padding:11px 14px;border-radius:8px;background:var(--raised);
color:var(--ink);border:1px solid var(--faint);box-shadow:0 6px 24px rgb(0 0 0/.22);font-size:13px;line-height:1.45;
pointer-events:none;overflow-wrap:anywhere}
#tip[hidden]{display:none}#tip strong{display:block;font-size:14px}#tip div+div{margin-top:3px}
#tip .quiet{color:var(--soft)}#tip .now{border-top:1px solid var(--faint);margin-top:8px;padding-top:7px}
@media(max-width:760px){
main{padding:24px 16px 48px}figure{padding:8px 6px 12px}svg.wide{display:none}svg.small{display:block;max-width:560px}
/* A row of a wide table becomes a list of what its columns say: nothing is cut, nothing has to be scrolled to. */
.stacked thead{display:none}.stacked table,.stacked tbody,.stacked tr,.stacked td{display:block;width:auto}
.stacked tr{border-bottom:1px solid var(--faint);padding:8px 0}.stacked tr.total{border-bottom:0}
.stacked td,.narrow.stacked td{border:0;padding:1px 0 1px 9.5em;min-width:0;max-width:none;text-align:left;
white-space:normal;overflow-wrap:anywhere;position:relative}
.stacked td.number{text-align:left;white-space:normal}
.stacked td[data-head]::before{content:attr(data-head);position:absolute;left:0;width:9em;color:var(--soft);
font-size:13px}
.stacked td:first-child{padding-left:0;font-weight:600}.stacked td:first-child::before{display:none}
.stacked td.number:first-child::before{display:inline;position:static;padding-right:.5em;width:auto}
.stacked td.none{display:none}td.value code,.stacked td.value code{min-width:0;max-width:none}
td.location,td.why,td.name,td.value{min-width:0}.bar{min-width:80px}th,th.number{white-space:normal}
.narrow table{min-width:0;width:100%}.narrow td,.narrow th{padding-right:14px}
.narrow td{overflow-wrap:anywhere}}
@media print{#tip{display:none}details>*{display:block}}
"""

COLORED_ROLES = (
    "parameters",
    "optimizer",
    "buffers",
    "batch",
    "constants",
    "other",
    "kept",
    "codes",
    "recomputed",
    "gradients",
    "outputs",
    "temporaries",
    "workspace",
)


def make_style() -> str:
    """The sheet with a class for the colour of each role, for shapes and for boxes."""
    roles = (f".role-{name}{{fill:var(--{name});background:var(--{name})}}" for name in COLORED_ROLES)
    return STYLE + "\n".join(roles)
