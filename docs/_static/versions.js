"use strict";
// A choice of versions in the sidebar. The file versions.js beside the versions' folders lists them with their pages; it
// is a script, because a page that is opened from a disk may not fetch a file.
(() => {
  const root = document.documentElement.dataset.content_root ?? "./";
  const own = new URL(root, location.href).href;
  const page = decodeURIComponent(location.href.replace(/[?#].*$/, "").slice(own.length)) || "index.html";

  function show(versions) {
    const label = document.createElement("label"), select = document.createElement("select");
    for (const { folder, pages } of versions) {
      const target = pages.includes(page) ? page : "index.html"; // a page that another version lacks
      const option = new Option(folder, `${root}../${folder}/${target}`);
      option.selected = option.defaultSelected = decodeURIComponent(own).endsWith(`/${folder}/`);
      select.append(option);
    }
    select.addEventListener("change", () => location.assign(select.value));
    label.className = "versions";
    label.append("Version ", select);
    document.querySelector(".sidebar-brand")?.after(label);
  }

  const list = document.createElement("script");
  list.src = `${root}../versions.js`;
  list.addEventListener("load", () => show(window.siteVersions));
  document.head.append(list);
})();
