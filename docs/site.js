// Material gives every code block a bar with a copy button when it comes into view: landmarks need names of their own.
new MutationObserver(() =>
  document.querySelectorAll(".md-code__nav").forEach((bar, i) => bar.setAttribute("aria-label", `Code ${i + 1}`))
).observe(document.body, { childList: true, subtree: true });
