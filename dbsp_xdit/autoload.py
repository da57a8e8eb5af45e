def autoload(): pass
