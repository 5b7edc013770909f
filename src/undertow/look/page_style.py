"""What the page of a Look adds to the style of all pages."""

from __future__ import annotations

LOOK_STYLE = """
.reading{margin-top:22px}
.key-more{background:#e06c18}.key-less{background:#2270be}
h2{overflow-wrap:anywhere}section img{image-rendering:pixelated;display:block}
.sheet{display:grid;grid-template-columns:repeat(auto-fill,minmax(44px,1fr));gap:8px;padding:14px}
.sheet img,.filter img{width:100%;background:var(--page);border-radius:3px}
.units{display:grid;grid-template-columns:repeat(auto-fill,minmax(340px,1fr));gap:14px;margin:14px 0 0}
article{background:var(--raised);border:1px solid var(--faint);border-radius:10px;padding:14px;min-width:0}
.filter{display:flex;gap:14px;align-items:center;margin:0 0 12px}
.filter>img{flex:0 0 72px;width:72px;max-height:72px;object-fit:contain}.filter h3{margin:0;font-size:17px}
.filter small{color:var(--soft);font-size:13px;line-height:1.35;display:block}
.samples{display:grid;grid-auto-flow:column;grid-auto-columns:minmax(0,1fr);gap:8px}
.samples span{position:relative;display:block;margin:0 0 6px}
.samples img{width:100%;border-radius:3px;background:var(--page)}
.samples i{position:absolute;border:1.5px solid #e06c18;box-shadow:0 0 0 1px rgb(255 255 255/.55);border-radius:2px}
.samples small{display:block;font-size:12px;color:var(--soft);text-align:center;white-space:nowrap;overflow:hidden;
text-overflow:ellipsis;font-variant-numeric:tabular-nums}.samples small b{font-weight:600;color:var(--ink)}
.texts{grid-template-columns:repeat(auto-fill,minmax(480px,1fr))}
.contexts p{display:flex;gap:10px;align-items:baseline;margin:0 0 3px;max-width:none}
.contexts small{flex:0 0 3.2em;text-align:right;color:var(--soft);font-variant-numeric:tabular-nums}
.contexts code{flex:1;min-width:0;overflow-wrap:anywhere;line-height:1.6}
.contexts span{--share:0;background:color-mix(in srgb,#e06c18 calc(var(--share)*65%),transparent);border-radius:2px}
.contexts .at{border-bottom:2px solid var(--ink)}.contexts .after{opacity:.5}
.cosines img{width:min(420px,100%);background:var(--page)}
svg .character{font-size:15px;fill:var(--ink)}svg .vowel{fill:#e06c18;font-weight:700}svg .sign{fill:var(--soft)}
@media(max-width:760px){.units,.texts{grid-template-columns:minmax(0,1fr)}.contexts .after{display:none}
.sheet{grid-template-columns:repeat(auto-fill,minmax(34px,1fr));gap:6px;padding:10px}}
"""
